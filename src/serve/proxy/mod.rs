//! The proxy: agents speak OpenAI's or Anthropic's API to it, and it records the exact tokens that were
//! sampled.
//!
//! ```text
//! HTTP ── http (routes, secret) ── request (bytes → turn) ── session ── capture (tree of turns)
//!                                     │ protocol               │
//!              stream / whole reply ◄──────────── live ◄── turn (one task a turn) ── router ── engines
//! ```
//!
//! * **Its own threads.** The proxy runs on a runtime of its own: no trainer step, checkpoint or
//!   validation can block it. Work on one session never blocks another: a session's record has its own
//!   lock, and encoding of large bodies runs on blocking threads.
//! * **Life of a request.** A turn is a task that is shared by every request for it. The same request sent
//!   again joins the running turn or gets the recorded answer; when the last client has gone away, the
//!   generation is cancelled and leaves no trace but a counter. After [`SessionHost::close`] nothing of a
//!   session remains, and its requests get 404.
//! * **Sampling.** Agents do not choose it: temperature and the like come from the [`SessionSpec`], since
//!   the trainer must know the distribution. The seed of a turn is [`mix_seed`] of the session's seed, the
//!   branch and the turn's depth in it, so a retried turn draws the same tokens and two branches do not.
//!
//! Invariant: a token in a [`CapturedSession`] that counts for the loss was sent by an engine, in this
//! place, with the log-prob and version that stand beside it.

mod admin;
mod body;
pub mod capture;
mod error;
mod http;
mod live;
mod metrics;
pub mod protocol;
mod request;
pub mod router;
pub mod routing;
mod session;
mod stream;
#[cfg(test)]
mod tests;
mod turn;

pub use admin::AdminConfig;
pub use error::ApiError;
pub use session::{TIME_LIMIT_NOTICE, TOKEN_LIMIT_NOTICE, TURN_LIMIT_NOTICE};

use crate::{
    base::{
        BranchKind, CapturedSession, GroupId, SessionEndpoint, SessionError, SessionHost, SessionId,
        SessionSpec,
    },
    model::{
        chat_template::{ChatTemplate, TemplateError},
        tokenizer::{Tokenizer, TokenizerError},
        tool_calls::{self, ToolCallFormat, UnknownFormat},
    },
};
use axum::serve::ListenerExt;
use capture::{RenderError, Renderer};
use router::Router;
use routing::{RoutingCapture, RoutingFile};
use serde_json::{Map, Value};
use session::{Closed, Session};
use std::{
    collections::HashMap,
    future::IntoFuture,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        Arc, Mutex, PoisonError, RwLock,
    },
    time::Duration,
};
use tokio::{runtime::Handle, sync::watch};

/// Settings of a [`Proxy`].
#[derive(Clone, Debug)]
pub struct ProxyConfig {
    /// TCP address to listen on (`PROXY_HOST`, `PROXY_PORT`; port 0 takes any); `None` for none.
    pub tcp: Option<SocketAddr>,
    /// Unix socket to listen on, for sandboxes without network.
    pub unix_socket: PathBuf,
    /// Name of the served model (`SERVED_MODEL_NAME`).
    pub model: String,
    /// Folder with tokenizer.json and the chat template (`MODEL_PATH`).
    pub model_dir: PathBuf,
    /// Tool-call markup (`TOOL_CALL_PARSER`).
    pub tool_call_parser: String,
    /// Variables for the chat template, for example `enable_thinking`.
    pub template_variables: Map<String, Value>,
    /// Largest request body in bytes (`MAX_REQUEST_BODY_MB`).
    pub max_body_bytes: usize,
    /// Threads of the proxy's runtime.
    pub threads: usize,
    /// Kinds of branches that are trained on (`PROXY_TRAIN_BRANCHES`).
    pub train_branches: Vec<BranchKind>,
    /// Most sampled tokens of a session over all its branches (`PROXY_MAX_SESSION_TOKENS`); then its requests
    /// are answered with a notice.
    pub max_session_tokens: Option<u64>,
    /// Sessions may be opened and closed over HTTP.
    pub admin: Option<AdminConfig>,
    /// Record the experts of sessions that are trained on (`ENABLE_R3`).
    pub routing: Option<RoutingCapture>,
}

impl ProxyConfig {
    /// Kinds of branches that are trained on unless the configuration says otherwise: all but requests for a
    /// summary and side requests.
    pub const TRAIN_BRANCHES: [BranchKind; 5] = [
        BranchKind::Main,
        BranchKind::SubAgent,
        BranchKind::Compaction,
        BranchKind::Retry,
        BranchKind::Rewritten,
    ];

    /// Defaults: no TCP, hermes, 256 MiB, two threads, no cap on a session's tokens, no admin.
    pub fn new(unix_socket: PathBuf, model: String, model_dir: PathBuf) -> Self {
        Self {
            tcp: None,
            unix_socket,
            model,
            model_dir,
            tool_call_parser: "hermes".into(),
            template_variables: Map::new(),
            max_body_bytes: 256 << 20,
            threads: 2,
            train_branches: Self::TRAIN_BRANCHES.to_vec(),
            max_session_tokens: None,
            admin: None,
            routing: None,
        }
    }
}

/// The proxy cannot start or stop.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The address is taken or not of this machine.
    #[error("cannot listen on {address}: {source}; choose another PROXY_PORT (0 takes any) or PROXY_HOST")]
    Bind {
        /// TCP address.
        address: SocketAddr,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The socket cannot be made.
    #[error("cannot listen on the unix socket `{path}`: {source}")]
    Socket {
        /// Its path.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The folder for rows of routing.
    #[error(
        "cannot prepare the folder `{path}` for routing replay: {source}; ENABLE_R3=False trains without"
    )]
    Routing {
        /// Its path.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The path is longer than the system takes.
    #[error("the unix socket path `{0}` is longer than 107 bytes; choose a shorter RUN_DIR")]
    SocketPath(PathBuf),
    /// The runtime's threads cannot be made.
    #[error("cannot start the proxy's threads: {0}")]
    Threads(#[source] std::io::Error),
    /// The model folder's tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The model folder's chat template.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The template cannot serve growing conversations.
    #[error(transparent)]
    Render(#[from] RenderError),
    /// `TOOL_CALL_PARSER`.
    #[error(transparent)]
    Format(#[from] UnknownFormat),
    /// Connections were still open at the deadline.
    #[error("the proxy's threads did not end within {} s", .0.as_secs())]
    Shutdown(Duration),
}

/// Mixes a seed with a branch and a turn: three rounds of SplitMix64's finaliser, each over the result so
/// far plus the next number times the golden-ratio constant.
pub fn mix_seed(seed: u64, branch: u64, turn: u64) -> u64 {
    [0x5e55_1095, branch, turn].iter().fold(seed, |hash, number| {
        let z = hash.wrapping_add(number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// Random bytes from the system, as hexadecimal text.
fn random_hex(bytes: usize) -> String {
    let mut raw = vec![0; bytes];
    // Linux has had the system call since 3.17; a proxy with guessable secrets must not run.
    getrandom::fill(&mut raw).expect("the system gives random bytes");
    raw.iter().map(|b| format!("{b:02x}")).collect()
}

/// What all requests share.
pub struct Shared {
    model: String,
    max_body_bytes: usize,
    train_branches: Vec<BranchKind>,
    max_session_tokens: Option<u64>,
    admin: Option<AdminConfig>,
    routing: Option<RoutingCapture>,
    /// Sessions opened over HTTP.
    opened: AtomicU64,
    tcp: Option<SocketAddr>,
    renderer: Renderer,
    format: Arc<dyn ToolCallFormat>,
    router: Arc<Router>,
    sessions: RwLock<HashMap<Arc<str>, Arc<Session>>>,
    draining: AtomicBool,
    running_turns: AtomicUsize,
    counters: metrics::Counters,
    handle: Handle,
}

impl Shared {
    fn session(&self, id: &str) -> Option<Arc<Session>> {
        let sessions = self.sessions.read().unwrap_or_else(PoisonError::into_inner);
        sessions.get(id).cloned()
    }

    fn open_sessions(&self) -> usize {
        self.sessions.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}

/// See the module documentation.
pub struct Proxy {
    shared: Arc<Shared>,
    tcp: Option<SocketAddr>,
    unix_socket: PathBuf,
    stop: watch::Sender<bool>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl Proxy {
    /// Reads the model folder, binds both addresses and serves until [`Proxy::shutdown`] or drop.
    pub fn start(config: ProxyConfig, router: Arc<Router>) -> Result<Arc<Self>, ProxyError> {
        let tokenizer = Tokenizer::from_dir(&config.model_dir)?;
        let template = ChatTemplate::from_dir(&config.model_dir)?;
        let format = tool_calls::format_by_name(&config.tool_call_parser, &template)?;
        let renderer = Renderer::new(template, tokenizer, config.template_variables)?;
        let tcp = config.tcp.map(bind_tcp).transpose()?;
        let address = match &tcp {
            Some(listener) => Some(listener.local_addr().map_err(ProxyError::Threads)?),
            None => None,
        };
        if let Some(capture) = &config.routing {
            capture.prepare().map_err(|source| ProxyError::Routing {
                path: capture.dir.clone(),
                source,
            })?;
        }
        let unix = bind_unix(&config.unix_socket)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(config.threads.max(1))
            .thread_name("proxy")
            .enable_all()
            .build()
            .map_err(ProxyError::Threads)?;
        let shared = Arc::new(Shared {
            model: config.model,
            max_body_bytes: config.max_body_bytes,
            train_branches: config.train_branches,
            max_session_tokens: config.max_session_tokens,
            admin: config.admin,
            routing: config.routing,
            opened: AtomicU64::new(0),
            tcp: address,
            renderer,
            format,
            router,
            sessions: RwLock::default(),
            draining: AtomicBool::new(false),
            running_turns: AtomicUsize::new(0),
            counters: metrics::Counters::default(),
            handle: runtime.handle().clone(),
        });
        let (stop, stopped) = watch::channel(false);
        let routes = http::routes(shared.clone());
        let serve = async move {
            let until = |mut stopped: watch::Receiver<bool>| async move {
                // The sender goes away when the proxy is dropped, which also means stop.
                let _ = stopped.wait_for(|stop| *stop).await;
            };
            let unix = tokio::net::UnixListener::from_std(unix)?;
            let unix = axum::serve(unix, routes.clone()).with_graceful_shutdown(until(stopped.clone()));
            match tcp {
                None => unix.await,
                Some(tcp) => {
                    let tcp = tokio::net::TcpListener::from_std(tcp)?.tap_io(|stream| {
                        // Without it small events of a stream wait for the client's acknowledgement.
                        if let Err(error) = stream.set_nodelay(true) {
                            tracing::debug!(%error, "TCP_NODELAY");
                        }
                    });
                    let tcp = axum::serve(tcp, routes).with_graceful_shutdown(until(stopped));
                    tokio::try_join!(unix.into_future(), tcp.into_future()).map(|_| ())
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("proxy-main".into())
            .spawn(move || {
                if let Err(error) = runtime.block_on(serve) {
                    tracing::error!(%error, "the proxy stopped serving");
                }
                runtime.shutdown_timeout(Duration::from_secs(1));
            })
            .map_err(ProxyError::Threads)?;
        tracing::info!(tcp = ?address, unix = %config.unix_socket.display(), model = %shared.model, "proxy serves");
        Ok(Arc::new(Self {
            shared,
            tcp: address,
            unix_socket: config.unix_socket,
            stop,
            thread: Mutex::new(Some(thread)),
        }))
    }

    /// The TCP address, with the port that was chosen.
    pub fn tcp(&self) -> Option<SocketAddr> {
        self.tcp
    }

    /// The router behind the proxy.
    pub fn router(&self) -> &Arc<Router> {
        &self.shared.router
    }

    /// Requests get 429 or 529 with retry-after, and no session opens; running turns go on.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Relaxed);
    }

    /// Turns that are generated now.
    pub fn running_turns(&self) -> usize {
        self.shared.running_turns.load(Ordering::Relaxed)
    }

    /// Drains, cancels what runs, and ends the threads. Sessions can still be closed afterwards.
    pub async fn shutdown(&self, deadline: Duration) -> Result<(), ProxyError> {
        self.drain();
        for session in self.sessions() {
            session.shut(Closed::Cancelled);
        }
        self.stop.send_replace(true);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let end = tokio::time::Instant::now() + deadline;
            while !thread.is_finished() {
                if tokio::time::Instant::now() >= end {
                    return Err(ProxyError::Shutdown(deadline));
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        Ok(())
    }

    fn sessions(&self) -> Vec<Arc<Session>> {
        let sessions = self
            .shared
            .sessions
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        sessions.values().cloned().collect()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Err(error) = std::fs::remove_file(&self.unix_socket) {
            tracing::debug!(%error, path = %self.unix_socket.display(), "unix socket");
        }
    }
}

impl Proxy {
    fn open_in(shared: &Shared, spec: SessionSpec) -> Result<Arc<Session>, SessionError> {
        if shared.is_draining() {
            return Err(SessionError::Closed("it is draining".into()));
        }
        let session = Session::new(spec, random_hex(16));
        if let Some(capture) = shared.routing.as_ref().filter(|_| session.is_trained()) {
            session.lock().tree.record_routing(RoutingFile::new(capture));
        }
        let session = Arc::new(session);
        let mut sessions = shared.sessions.write().unwrap_or_else(PoisonError::into_inner);
        if sessions.contains_key(&session.id.0) {
            return Err(SessionError::Closed(format!(
                "a session named `{}` is already open",
                session.id
            )));
        }
        sessions.insert(session.id.0.clone(), session.clone());
        Ok(session)
    }

    async fn close_in(shared: &Arc<Shared>, id: &SessionId) -> Result<CapturedSession, SessionError> {
        let session = {
            let mut sessions = shared.sessions.write().unwrap_or_else(PoisonError::into_inner);
            sessions.remove(&id.0)
        };
        let session = session.ok_or_else(|| SessionError::Unknown(id.clone()))?;
        session.shut(Closed::ByTrial);
        shared.router.end_session(id);
        // The record may be locked by a request that encodes: wait on a thread that may block.
        let (owner, proxy) = (session.clone(), shared.clone());
        tokio::task::spawn_blocking(move || owner.hand_over(&proxy.train_branches))
            .await
            .map_err(|error| {
                SessionError::Closed(format!("session `{id}` could not be handed over: {error}"))
            })
    }
}

#[async_trait::async_trait]
impl SessionHost for Proxy {
    fn open(&self, spec: SessionSpec) -> Result<SessionEndpoint, SessionError> {
        let session = Self::open_in(&self.shared, spec)?;
        Ok(SessionEndpoint {
            path: session.path(),
            session: session.id.clone(),
            secret: session.secret.clone(),
            model: self.shared.model.clone(),
            tcp: self.tcp,
            unix_socket: self.unix_socket.clone(),
        })
    }

    async fn close(&self, id: &SessionId) -> Result<CapturedSession, SessionError> {
        Self::close_in(&self.shared, id).await
    }

    fn cancel_group(&self, group: GroupId) {
        for session in self.sessions() {
            if session.spec.key.group == group {
                session.shut(Closed::Cancelled);
            }
        }
    }
}

/// Inputs of a property: `LEGORL_FUZZ_CASES`, or else `short`.
#[cfg(test)]
fn fuzz_cases(short: u32) -> u32 {
    std::env::var("LEGORL_FUZZ_CASES").map_or(short, |n| n.parse().expect("LEGORL_FUZZ_CASES is a number"))
}

fn bind_tcp(address: SocketAddr) -> Result<std::net::TcpListener, ProxyError> {
    let bind = || {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    bind().map_err(|source| ProxyError::Bind { address, source })
}

/// Replaces a socket file that nobody listens on. Every user may connect: the secret is the guard.
fn bind_unix(path: &PathBuf) -> Result<std::os::unix::net::UnixListener, ProxyError> {
    use std::os::unix::{ffi::OsStrExt, fs::PermissionsExt, net};
    if path.as_os_str().as_bytes().len() > 107 {
        return Err(ProxyError::SocketPath(path.clone()));
    }
    let bind = || {
        if path.exists() {
            if net::UnixStream::connect(path).is_ok() {
                return Err(std::io::Error::new(
                    std::io::ErrorKind::AddrInUse,
                    "another process listens on it",
                ));
            }
            std::fs::remove_file(path)?;
        }
        let listener = net::UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777))?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    bind().map_err(|source| ProxyError::Socket {
        path: path.clone(),
        source,
    })
}
