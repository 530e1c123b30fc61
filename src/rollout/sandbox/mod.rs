//! Sandboxes: a place where an agent may run any command and reach nothing but the proxy.
//!
//! Takes a [`SandboxSpec`], gives a running [`Sandbox`] with `exec`, `upload`, `download` and `delete`.
//!
//! What every backend promises:
//!
//! | Promise | How it is kept |
//! |---|---|
//! | No network but the proxy | the proxy answers on [`Sandbox::proxy_address`]; nothing else is reachable |
//! | Task, tests, runs and home directories are not visible | only what was uploaded is inside |
//! | Several commands share one sandbox | agent first, verifier later; background processes live on between |
//! | Nothing survives | [`Sandbox::delete`], a dropped handle, and a killed parent all end every process |
//! | Leftovers are found | [`SandboxBackend::reap`] removes what dead runs of the same owner left |
//! | Output is bounded | a log file up to a cap, then a note; the tail stays in memory |
//! | Every wait ends | commands have time limits, a sandbox has a wall-time limit |
//!
//! A sandbox that cannot do what was asked says so with a [`SandboxError`]; it never degrades silently.
//! The one choice that depends on the machine, how limits are enforced, is told by [`BackendReport`].

pub mod docker;
pub mod dockerfile;
mod error;
pub mod kubernetes;
pub mod process;
mod spec;

pub use error::SandboxError;
pub use process::{ProcessBackend, ProcessBackendConfig};
pub use spec::{
    BackendReport, ExecResult, ExecSpec, Labels, LimitsBy, LogFile, ReadOnlyMount, SandboxSpec,
    DEFAULT_LOG_CAP_BYTES,
};

use async_trait::async_trait;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

/// Starts sandboxes of one kind.
#[async_trait]
pub trait SandboxBackend: Send + Sync {
    /// Value of `BACKEND` that selects it.
    fn name(&self) -> &'static str;
    /// Proves before launch that sandboxes can start; the error says what is missing and how to get it.
    async fn check(&self) -> Result<BackendReport, SandboxError>;
    /// Starts a sandbox and applies the task's `environment/Dockerfile` in it.
    async fn start(&self, spec: SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError>;
    /// Deletes what dead runs of this owner left (folders, processes); gives the number of sandboxes.
    async fn reap(&self) -> Result<usize, SandboxError>;
}

/// A running sandbox. Dropping it ends its processes and deletes its files in the background;
/// [`Sandbox::delete`] does the same and waits for it.
#[async_trait]
pub trait Sandbox: Send + Sync {
    /// Runs one command to its end. A time-out is a result, not an error.
    async fn exec(&self, spec: ExecSpec) -> Result<ExecResult, SandboxError>;
    /// Copies a file to the path `remote`, or the content of a folder into the folder `remote`.
    /// Missing parent folders are made.
    async fn upload(&self, local: &Path, remote: &str) -> Result<(), SandboxError>;
    /// Copies the file `remote` to the path `local`, or the content of a folder into the folder `local`.
    /// Only regular files and folders come out; links, sockets and devices stay inside.
    async fn download(&self, remote: &str, local: &Path) -> Result<(), SandboxError>;
    /// Makes a folder with its parents; an existing one is fine.
    async fn make_dir(&self, remote: &str) -> Result<(), SandboxError> {
        let result = self.exec(ExecSpec::new(["mkdir", "-p", remote])).await?;
        if result.success() {
            return Ok(());
        }
        Err(SandboxError::Refused {
            name: String::new(),
            action: format!("making the folder `{remote}`"),
            problem: result.tail,
        })
    }
    /// Ends every process of the sandbox and takes its files away.
    async fn delete(self: Box<Self>) -> Result<(), SandboxError>;
    /// Path of the static helper inside, where the backend brings it along.
    fn helper(&self) -> Option<&str> {
        None
    }
    /// Where the proxy is reachable from inside, over plain HTTP.
    fn proxy_address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, legorl_agent::protocol::PROXY_PORT))
    }
}
