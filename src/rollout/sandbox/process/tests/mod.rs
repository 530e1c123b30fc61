//! Real sandboxes, as the user who runs the tests and, when that is root, as a plain user as well.

mod commands;
mod files;
mod isolation;
mod life;

use super::*;
use crate::rollout::sandbox::{ExecResult, LogFile, ReadOnlyMount};
use std::future::Future;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::OnceLock;

const NOBODY: u32 = 65534;

/// A backend with a state folder of its own.
struct Bench {
    dir: tempfile::TempDir,
    backend: ProcessBackend,
}

impl Bench {
    /// In memory where possible: some disks take milliseconds to delete a folder.
    fn new() -> Self {
        Self::on(
            tempfile::tempdir_in("/dev/shm")
                .or_else(|_| tempfile::tempdir())
                .unwrap(),
        )
    }

    fn on(dir: tempfile::TempDir) -> Self {
        let backend = ProcessBackend::new(ProcessBackendConfig {
            state_dir: dir.path().join("state"),
            rootfs: None,
            helper: Some(helper_copy(dir.path())),
            owner: "test".into(),
        });
        Self { dir, backend }
    }

    /// The same without control groups.
    fn with_watchdog() -> Self {
        let bench = Self::new();
        let limiter = Arc::new(limits::Limiter::watchdog("test"));
        bench.backend.limiter.set(limiter).ok().unwrap();
        bench
    }

    /// The same without overlays.
    async fn with_folders() -> Self {
        let bench = Self::new();
        let because = "chosen by the test".to_string();
        let base = bench
            .backend
            .make_base(Layout::Folders { because })
            .await
            .unwrap();
        bench.backend.base.set(base).ok().unwrap();
        bench
    }

    async fn start(&self, spec: SandboxSpec) -> Box<dyn Sandbox> {
        self.backend.start(spec).await.unwrap()
    }

    fn leftovers(&self) -> Vec<PathBuf> {
        let state = std::fs::read_dir(self.dir.path().join("state")).unwrap();
        state
            .flatten()
            .flat_map(|i| std::fs::read_dir(i.path()).unwrap().flatten())
            .filter(|e| !e.file_name().to_string_lossy().starts_with('.'))
            .map(|e| e.path())
            .filter(|p| p.is_dir())
            .collect()
    }
}

/// The source tree may be closed to a plain user.
fn helper_copy(dir: &Path) -> PathBuf {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    let bytes = BYTES.get_or_init(|| std::fs::read(helper::for_tests()).unwrap());
    let path = dir.join("legorl-agent");
    std::fs::write(&path, bytes).unwrap();
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Runs a test as the current user and, from root, as a plain user too.
fn as_each_user<F: Future<Output = ()>>(test: impl Fn() -> F + Send + Sync) {
    helper_copy(tempfile::tempdir().unwrap().path());
    std::thread::scope(|scope| {
        let run = |uid: Option<u32>| {
            let test = &test;
            let thread = scope.spawn(move || {
                if let Some(uid) = uid {
                    become_user(uid);
                }
                // Its worker threads are made by this thread, and so belong to the same user.
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.unwrap().block_on(test());
            });
            if let Err(panic) = thread.join() {
                eprintln!("as user {uid:?}");
                std::panic::resume_unwind(panic);
            }
        };
        run(None);
        // SAFETY: geteuid cannot fail.
        if unsafe { libc::geteuid() } == 0 {
            run(Some(NOBODY));
        }
    });
}

/// Changes the user of this thread alone: the raw system calls, unlike those of libc, do no more.
fn become_user(uid: u32) {
    // SAFETY: system calls with integer arguments and a null list of length 0.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>()), 0);
        assert_eq!(libc::syscall(libc::SYS_setresgid, uid, uid, uid), 0);
        assert_eq!(libc::syscall(libc::SYS_setresuid, uid, uid, uid), 0);
        // The kernel closed /proc/self to the new user.
        libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
    }
}

async fn sh(sandbox: &dyn Sandbox, script: &str) -> ExecResult {
    sandbox.exec(ExecSpec::shell(script)).await.unwrap()
}

async fn says(sandbox: &dyn Sandbox, script: &str) -> String {
    let result = sh(sandbox, script).await;
    assert!(result.success(), "{script}: {result:?}");
    result.tail.trim().to_string()
}

/// Processes of this machine whose command line holds the text.
fn processes_with(marker: &str) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let pid = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok());
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if let (Some(pid), true) = (pid, String::from_utf8_lossy(&command).contains(marker)) {
            found.push(pid);
        }
    }
    found
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "waited 30 s for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn unique(prefix: &str) -> String {
    format!("{prefix}{}", getrandom::u32().unwrap())
}
