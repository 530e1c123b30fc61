//! Real sandboxes, as the user who runs the tests and, when that is root, as a plain user as well.

use super::*;
use crate::rollout::sandbox::{ExecResult, LogFile};
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
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
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

#[test]
fn the_check_names_the_runtime_and_what_enforces_limits() {
    as_each_user(|| async {
        let bench = Bench::new();
        let report = bench.backend.check().await.unwrap();
        assert!(report.runtime.starts_with("bubblewrap "), "{report}");
        assert!(bench.leftovers().is_empty());
    });
}

#[test]
fn nothing_of_the_machine_is_visible_but_system_folders() {
    as_each_user(|| async {
        check_view(Bench::new()).await;
        check_view(Bench::with_folders().await).await;
    });
}

async fn check_view(bench: Bench) {
    let secret = bench.dir.path().join("secret");
    std::fs::write(&secret, "task solution").unwrap();
    let sandbox = bench.start(SandboxSpec::new("view")).await;
    let sandbox = sandbox.as_ref();

    let top = says(sandbox, "ls /").await;
    let expected = [
        "app", "bin", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "logs", "mnt", "opt", "proc",
        "root", "run", "sbin", "srv", "tmp", "usr", "var",
    ];
    for name in top.lines() {
        assert!(expected.contains(&name), "/{name} is visible");
    }
    let found = format!(
        "test ! -e {} && ls -A /tmp /root /home /opt /srv /mnt",
        secret.display()
    );
    let listing = says(sandbox, &found).await;
    assert_eq!(
        listing
            .lines()
            .filter(|l| !l.is_empty() && !l.ends_with(':'))
            .count(),
        0,
        "{listing}"
    );
    let repository = format!("test ! -e {}", env!("CARGO_MANIFEST_DIR"));
    says(sandbox, &repository).await;
    says(sandbox, "test ! -e /etc/shadow && test ! -e /etc/ssl/private").await;
    says(sandbox, "test -f /etc/ld.so.cache && awk 'BEGIN { exit 0 }'").await;
    assert_eq!(says(sandbox, "id -u; hostname").await, "0\nsandbox");

    // Only this sandbox's processes: the first one, the shell and its children.
    let pids = says(sandbox, "ls -d /proc/[0-9]* | wc -l").await;
    assert!(pids.parse::<u32>().unwrap() < 8, "{pids}");
    sandbox.exec(ExecSpec::new(["/bin/true"])).await.unwrap();
}

#[test]
fn system_and_kernel_settings_cannot_be_written_and_private_folders_can() {
    as_each_user(|| async {
        check_writes(Bench::new()).await;
        check_writes(Bench::with_folders().await).await;
    });
}

async fn check_writes(bench: Bench) {
    let sandbox = bench.start(SandboxSpec::new("writes")).await;
    for target in [
        "/usr/x",
        "/usr/bin/env",
        "/dev/x",
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sysrq-trigger",
        "/run/legorl/agent",
    ] {
        // Opened for appending, nothing written: a hole would not hurt the machine.
        let result = sh(sandbox.as_ref(), &format!(": >> {target}")).await;
        if target == "/proc/sysrq-trigger" {
            continue; // bound to /dev/null, which may be opened
        }
        assert!(!result.success(), "{target} is writable");
    }
    for folder in [
        "/tmp",
        "/app",
        "/logs/verifier",
        "/root",
        "/var/tmp",
        "/etc",
        "/tests",
    ] {
        says(
            sandbox.as_ref(),
            &format!("mkdir -p {folder} && echo x > {folder}/f && cat {folder}/f"),
        )
        .await;
    }
    // No way to more rights: no further user namespaces, no mounts, no look into the first process.
    for attempt in [
        "unshare -U true",
        "mount -t tmpfs tmpfs /mnt",
        "cat /proc/1/environ",
        "readlink /proc/1/fd/10",
        "cat /proc/1/maps",
        "chroot / true",
        "kill -9 1; sleep 0.2; test ! -e /proc/1/stat",
    ] {
        assert!(!sh(sandbox.as_ref(), attempt).await.success(), "{attempt}");
    }
    sandbox.delete().await.unwrap();
    assert!(bench.leftovers().is_empty());
}

#[test]
fn the_only_way_out_is_the_proxy() {
    as_each_user(|| async {
        let bench = Bench::new();
        let outside = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = outside.local_addr().unwrap().port();
        let socket = bench.dir.path().join("proxy.sock");
        let proxy = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            // Answers two connections with what they sent.
            for stream in proxy.incoming().take(2) {
                let mut stream = stream.unwrap();
                let mut word = [0; 3];
                stream.read_exact(&mut word).unwrap();
                stream.write_all(b"proxy got ").unwrap();
                stream.write_all(&word).unwrap();
            }
        });
        let mut spec = SandboxSpec::new("net");
        spec.proxy_socket = Some(socket);
        let sandbox = bench.start(spec).await;
        let port_of_proxy = sandbox.proxy_address().port();
        let client = |port: u16, word: &str| {
            let script = format!("exec 3<>/dev/tcp/127.0.0.1/{port} && printf {word} >&3 && cat <&3");
            ExecSpec::new(["bash".to_string(), "-c".into(), script])
        };
        for word in ["one", "two"] {
            let result = sandbox.exec(client(port_of_proxy, word)).await.unwrap();
            assert_eq!(result.tail, format!("proxy got {word}"));
        }
        server.join().unwrap();
        let refused = sandbox.exec(client(port, "x")).await.unwrap();
        assert!(refused.tail.contains("refused"), "{refused:?}");
        let devices = says(sandbox.as_ref(), "tail -n +3 /proc/net/dev | cut -d: -f1").await;
        assert_eq!(devices, "lo");
    });
}

#[test]
fn commands_report_how_they_ended() {
    as_each_user(|| async {
        let bench = Bench::new();
        let mut spec = SandboxSpec::new("exec");
        spec.env.insert("COLOUR".into(), "blue".into());
        spec.workdir = Some("/work/here".into());
        let sandbox = bench.start(spec).await;
        let result = sh(sandbox.as_ref(), "echo out; echo err >&2; exit 7").await;
        assert_eq!((result.exit_code, result.tail.as_str()), (Some(7), "out\nerr\n"));
        let result = sh(sandbox.as_ref(), "kill -TERM $$").await;
        assert_eq!((result.exit_code, result.signal), (None, Some(15)));
        assert_eq!(
            says(sandbox.as_ref(), "echo $COLOUR $HOME; pwd").await,
            "blue /root\n/work/here"
        );
        let mut own = ExecSpec::shell("echo $COLOUR; pwd");
        own.env.insert("COLOUR".into(), "red".into());
        own.cwd = Some("/tmp".into());
        assert_eq!(sandbox.exec(own).await.unwrap().tail, "red\n/tmp\n");
        // A host's own variables stay outside.
        assert_eq!(says(sandbox.as_ref(), "env | grep -c CARGO || true").await, "0");

        let missing = sandbox
            .exec(ExecSpec::new(["/no/such/program"]))
            .await
            .unwrap_err();
        assert!(missing.to_string().contains("/no/such/program"), "{missing}");
        let mut nowhere = ExecSpec::shell("true");
        nowhere.cwd = Some("/no/such/folder".into());
        let error = sandbox.exec(nowhere).await.unwrap_err();
        assert!(error.to_string().contains("/no/such/folder"), "{error}");
        let mut other = ExecSpec::shell("true");
        other.user = Some("app".into());
        assert!(sandbox
            .exec(other)
            .await
            .unwrap_err()
            .to_string()
            .contains("`app`"));
    });
}

#[test]
fn a_silent_command_is_ended_by_its_limit_with_all_its_children() {
    as_each_user(|| async {
        let bench = Bench::new();
        let sandbox = bench.start(SandboxSpec::new("limit")).await;
        let mut spec = ExecSpec::shell("sleep 611 & (setsid sleep 612 &) ; sh -c 'sleep 613'");
        spec.timeout = Some(Duration::from_millis(500));
        let result = sandbox.exec(spec).await.unwrap();
        assert!(result.timed_out && result.exit_code.is_none(), "{result:?}");
        // The sandbox goes on, and what belonged to the command is gone.
        let left = says(
            sandbox.as_ref(),
            "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '",
        )
        .await;
        assert!(
            !left.contains("sleep 611") && !left.contains("sleep 613"),
            "{left}"
        );
    });
}

#[test]
fn a_dropped_command_is_killed() {
    as_each_user(|| async {
        let bench = Bench::new();
        let sandbox = bench.start(SandboxSpec::new("cancel")).await;
        let marker = unique("77");
        let forever = sandbox.exec(ExecSpec::new(["sleep", marker.as_str()]));
        assert!(tokio::time::timeout(Duration::from_millis(300), forever)
            .await
            .is_err());
        // The request to kill travels on the runtime of this test.
        let deadline = Instant::now() + Duration::from_secs(20);
        while !processes_with(&marker).is_empty() {
            assert!(Instant::now() < deadline, "the cancelled command still runs");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(says(sandbox.as_ref(), "echo alive").await, "alive");
    });
}

#[test]
fn background_processes_live_until_the_sandbox_ends_and_no_longer() {
    as_each_user(|| async {
        let bench = Bench::new();
        let marker = unique("31337");
        let sandbox = bench.start(SandboxSpec::new("daemon")).await;
        // Forked twice, in a session of its own, deaf to signals: a daemon.
        let daemon = format!("(setsid sh -c 'trap \"\" TERM HUP INT; sleep {marker}' >/dev/null 2>&1 &) &");
        says(sandbox.as_ref(), &daemon).await;
        wait_until("the daemon", || !processes_with(&marker).is_empty());
        // It really belongs to the user of this test.
        use std::os::unix::fs::MetadataExt;
        for pid in processes_with(&marker) {
            // SAFETY: geteuid cannot fail.
            let user = unsafe { libc::geteuid() };
            assert_eq!(std::fs::metadata(format!("/proc/{pid}")).unwrap().uid(), user);
        }
        says(
            sandbox.as_ref(),
            &format!("grep -q {marker} /proc/[0-9]*/cmdline"),
        )
        .await;
        sandbox.delete().await.unwrap();
        assert_eq!(processes_with(&marker), Vec::<u32>::new());
        assert!(bench.leftovers().is_empty());
    });
}

#[test]
fn a_dropped_sandbox_ends() {
    as_each_user(|| async {
        let bench = Bench::new();
        let marker = unique("4242");
        let sandbox = bench.start(SandboxSpec::new("dropped")).await;
        says(
            sandbox.as_ref(),
            &format!("sleep {marker} >/dev/null 2>&1 & true"),
        )
        .await;
        drop(sandbox);
        wait_until("its processes to end", || processes_with(&marker).is_empty());
        wait_until("its folder to go", || bench.leftovers().is_empty());
    });
}

#[test]
fn the_wall_limit_ends_the_sandbox_and_says_so() {
    as_each_user(|| async {
        let bench = Bench::new();
        let mut spec = SandboxSpec::new("wall");
        spec.wall_limit = Duration::from_millis(700);
        let sandbox = bench.start(spec).await;
        let error = sandbox.exec(ExecSpec::shell("sleep 600")).await.unwrap_err();
        assert!(error.to_string().contains("wall-time limit of 0.7 s"), "{error}");
        let error = sandbox.exec(ExecSpec::shell("true")).await.unwrap_err();
        assert!(matches!(error, SandboxError::Ended { .. }), "{error}");
    });
}

#[test]
fn fifty_mebibytes_of_output_are_cut_with_a_note() {
    as_each_user(|| async {
        let bench = Bench::new();
        let sandbox = bench.start(SandboxSpec::new("flood")).await;
        let mut spec = ExecSpec::shell("head -c 52428800 /dev/zero | tr '\\0' x; echo; echo the end");
        let path = bench.dir.path().join("out.log");
        spec.log = Some(LogFile {
            path: path.clone(),
            cap_bytes: 100_000,
        });
        let result = sandbox.exec(spec).await.unwrap();
        assert_eq!((result.exit_code, result.output_bytes), (Some(0), 52_428_809));
        assert!(result.tail.len() <= 64 << 10 && result.tail.ends_with("x\nthe end\n"));
        let log = std::fs::read_to_string(path).unwrap();
        assert!(log.len() < 200_000, "{}", log.len());
        assert!(log.contains("[output cut: 52428809 bytes in all, 100000 kept"));
        assert!(log.ends_with("the end\n"));
    });
}

#[test]
fn a_log_below_its_cap_is_whole() {
    as_each_user(|| async {
        let bench = Bench::new();
        let sandbox = bench.start(SandboxSpec::new("log")).await;
        let path = bench.dir.path().join("out.log");
        let mut spec = ExecSpec::shell("seq 1 20000");
        spec.log = Some(LogFile::new(&path));
        sandbox.exec(spec).await.unwrap();
        let want: String = (1..=20000).map(|i| format!("{i}\n")).collect();
        assert_eq!(std::fs::read_to_string(path).unwrap(), want);
        let mut spec = ExecSpec::shell("true");
        spec.log = Some(LogFile::new("/no/such/folder/log"));
        let error = sandbox.exec(spec).await.unwrap_err();
        assert!(error.to_string().contains("/no/such/folder/log"), "{error}");
    });
}

fn limited(name: &str) -> SandboxSpec {
    let mut spec = SandboxSpec::new(name);
    spec.memory_mb = Some(96);
    spec.pids_limit = Some(24);
    spec.cpus = Some(1.0);
    spec.storage_mb = Some(8);
    spec
}

async fn check_limits(bench: &Bench) {
    let sandbox = bench.start(limited("limits")).await;
    // A line of 400 MiB, which tail keeps in memory.
    let hog = "head -c 419430400 /dev/zero | tail -n 1 | wc -c; exit ${PIPESTATUS[1]}";
    let result = sandbox.exec(ExecSpec::new(["bash", "-c", hog])).await.unwrap();
    assert!(result.oom_killed && !result.success(), "{result:?}");
    // Far more processes than allowed at once; the sandbox survives and what remains is few.
    let bomb = "i=0; while [ $i -lt 300 ]; do sleep 60 & i=$((i+1)); done; echo all 300 started; wait";
    let mut spec = ExecSpec::shell(bomb);
    spec.timeout = Some(Duration::from_secs(5));
    let result = sandbox.exec(spec).await.unwrap();
    assert!(!result.success(), "{result:?}");
    assert!(
        result.pids_limit_hit || result.tail.contains("fork"),
        "{result:?}"
    );
    // What the bomb left in the background may fill the limit, and still the next commands can fork.
    let big = sh(sandbox.as_ref(), "head -c 16777216 /dev/zero > /tmp/big").await;
    assert!(!big.success(), "{big:?}");
    assert_eq!(
        says(sandbox.as_ref(), "wc -c < /tmp/big").await,
        (8 << 20).to_string()
    );
    assert_eq!(says(sandbox.as_ref(), "echo alive").await, "alive");
    sandbox.delete().await.unwrap();
}

#[test]
fn limits_hold_with_what_this_machine_offers() {
    as_each_user(|| async { check_limits(&Bench::new()).await });
}

#[test]
fn limits_hold_without_control_groups() {
    as_each_user(|| async { check_limits(&Bench::with_watchdog()).await });
}

#[test]
fn control_groups_go_with_the_sandbox() {
    as_each_user(|| async {
        let bench = Bench::new();
        let LimitsBy::Cgroup { parents, .. } = bench.backend.limits().await.unwrap() else {
            return; // This user may not make any here; the test of the watchdog covers it.
        };
        let sandbox = bench.start(limited("groups")).await;
        let tag = bench.backend.instance().await.unwrap().tag().to_string();
        let groups = || -> Vec<PathBuf> {
            let own = parents
                .iter()
                .flat_map(|p| std::fs::read_dir(p).unwrap().flatten());
            own.map(|e| e.path())
                .filter(|p| p.to_string_lossy().contains(&tag))
                .collect()
        };
        assert!(!groups().is_empty());
        sandbox.delete().await.unwrap();
        assert_eq!(groups(), Vec::<PathBuf>::new());
    });
}

#[test]
fn files_go_in_and_out_unchanged() {
    as_each_user(|| async {
        let bench = Bench::new();
        let sandbox = bench.start(SandboxSpec::new("files")).await;
        let source = bench.dir.path().join("source");
        std::fs::create_dir_all(source.join("deep/er")).unwrap();
        let blob: Vec<u8> = (0..300_000u32).map(|i| (i * 7) as u8).collect();
        std::fs::write(source.join("deep/er/blob"), &blob).unwrap();
        std::fs::write(source.join("empty"), "").unwrap();
        std::fs::write(source.join("run.sh"), "#!/bin/sh\necho ran\n").unwrap();
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(source.join("run.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::os::unix::fs::symlink("run.sh", source.join("link")).unwrap();
        sandbox.upload(&source, "/tests").await.unwrap();
        assert_eq!(
            says(sandbox.as_ref(), "/tests/link; wc -c < /tests/deep/er/blob").await,
            "ran\n300000"
        );

        let back = bench.dir.path().join("back");
        sandbox.download("/tests", &back).await.unwrap();
        assert_eq!(std::fs::read(back.join("deep/er/blob")).unwrap(), blob);
        assert_eq!(std::fs::read(back.join("empty")).unwrap(), b"");
        assert!(!back.join("link").exists(), "a link came out");
        sandbox
            .download("/tests/run.sh", &bench.dir.path().join("one"))
            .await
            .unwrap();
        assert!(bench.dir.path().join("one").is_file());
        let error = sandbox.download("/no/such", &back).await.unwrap_err();
        assert!(error.to_string().contains("/no/such"), "{error}");
        let error = sandbox
            .upload(Path::new("/no/such/local"), "/x")
            .await
            .unwrap_err();
        assert!(error.to_string().contains("/no/such/local"), "{error}");
    });
}

#[test]
fn links_that_an_agent_lays_lead_nowhere() {
    as_each_user(|| async {
        let bench = Bench::new();
        let outside = bench.dir.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        let sandbox = bench.start(SandboxSpec::new("links")).await;
        let trap = format!(
            "ln -s {0} /tests; mkdir -p /logs/verifier; ln -s {0}/secret /logs/verifier/reward.txt; mkfifo /logs/verifier/pipe",
            outside.display()
        );
        says(sandbox.as_ref(), &trap).await;
        std::fs::write(outside.join("secret"), "1.0").unwrap();
        let source = bench.dir.path().join("tests");
        std::fs::create_dir(&source).unwrap();
        std::fs::write(source.join("test.sh"), "echo").unwrap();
        sandbox.upload(&source, "/tests").await.unwrap();
        assert_eq!(
            std::fs::read_dir(&outside).unwrap().count(),
            1,
            "an upload left the sandbox"
        );
        says(sandbox.as_ref(), "test ! -L /tests && test -f /tests/test.sh").await;
        let back = bench.dir.path().join("back");
        sandbox.download("/logs/verifier", &back).await.unwrap();
        assert_eq!(
            std::fs::read_dir(back).unwrap().count(),
            0,
            "a link or pipe came out"
        );
    });
}

#[test]
fn a_full_disk_is_an_error_that_names_the_file() {
    as_each_user(|| async {
        let bench = Bench::new();
        let sandbox = bench.start(SandboxSpec::new("full")).await;
        let big = bench.dir.path().join("big");
        std::fs::write(&big, vec![1; 80 << 20]).unwrap();
        // /dev/shm holds 64 MiB.
        let error = sandbox
            .upload(&big, "/dev/shm/big")
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("/dev/shm/big") && error.contains("No space left"),
            "{error}"
        );
        assert_eq!(
            says(sandbox.as_ref(), "rm /dev/shm/big; echo alive").await,
            "alive"
        );
    });
}

fn environment(dir: &Path, dockerfile: &str) -> PathBuf {
    let environment = dir.join(unique("environment"));
    std::fs::create_dir_all(environment.join("data")).unwrap();
    std::fs::write(environment.join("Dockerfile"), dockerfile).unwrap();
    std::fs::write(environment.join("data/a.txt"), "a\n").unwrap();
    std::fs::write(environment.join("data/b.txt"), "b\n").unwrap();
    environment
}

#[test]
fn a_dockerfile_is_applied() {
    as_each_user(|| async {
        check_dockerfile(Bench::new()).await;
        check_dockerfile(Bench::with_folders().await).await;
    });
}

async fn check_dockerfile(bench: Bench) {
    let mut spec = SandboxSpec::new("build");
    spec.environment = Some(environment(
        bench.dir.path(),
        "FROM ubuntu:24.04\nARG NAME=world\nENV GREETING=\"hello $NAME\"\nWORKDIR /app\n\
         COPY data/a.txt .\nCOPY data /data\nCOPY data/*.txt many/\n\
         RUN echo $GREETING > made && \\\n    cp a.txt copy\nWORKDIR sub\nCMD [\"bash\"]\n",
    ));
    let sandbox = bench.start(spec).await;
    let seen = says(
        sandbox.as_ref(),
        "pwd; cd ..; cat made copy /data/b.txt; ls many; echo $GREETING; echo $NAME.",
    )
    .await;
    assert_eq!(seen, "/app/sub\nhello world\na\nb\na.txt\nb.txt\nhello world\n.");
}

#[test]
fn a_failing_line_is_an_error_with_file_and_line() {
    as_each_user(|| async {
        let bench = Bench::new();
        for (text, line, word) in [
            (
                "FROM a\nRUN true\nRUN echo broken >&2; exit 4\n",
                3,
                "status 4: broken",
            ),
            (
                "FROM a\n\nCOPY nothing /x\n",
                3,
                "`nothing` is not in the build context",
            ),
            ("FROM a\nVOLUME /x\n", 2, "VOLUME"),
            ("FROM a\nCOPY ../x /x\n", 2, "leads out"),
        ] {
            let mut spec = SandboxSpec::new(unique("fail"));
            spec.environment = Some(environment(bench.dir.path(), text));
            let error = bench.backend.start(spec).await.err().unwrap().to_string();
            assert!(
                error.contains(&format!("Dockerfile:{line}: ")) && error.contains(word),
                "{error}"
            );
        }
        wait_until("failed sandboxes to go", || bench.leftovers().is_empty());
    });
}

#[test]
fn a_set_up_that_takes_too_long_is_ended() {
    as_each_user(|| async {
        let bench = Bench::new();
        let marker = unique("555");
        let mut spec = SandboxSpec::new("slow");
        spec.environment = Some(environment(
            bench.dir.path(),
            &format!("FROM a\nRUN sleep {marker}\n"),
        ));
        spec.setup_timeout = Duration::from_secs(1);
        let error = bench.backend.start(spec).await.err().unwrap();
        assert!(matches!(error, SandboxError::Timeout { .. }), "{error}");
        wait_until("its processes to end", || processes_with(&marker).is_empty());
        wait_until("its folder to go", || bench.leftovers().is_empty());
    });
}

/// A root of nothing but busybox: the helper must run there, and writes go to the overlay.
#[test]
fn a_given_tree_is_the_root_and_stays_as_it_was() {
    as_each_user(|| async {
        let Some(busybox) = ["/bin/busybox", "/usr/bin/busybox"]
            .iter()
            .find(|p| Path::new(p).exists())
        else {
            panic!("install busybox-static");
        };
        let mut bench = Bench::new();
        let tree = bench.dir.path().join("tree");
        std::fs::create_dir_all(tree.join("bin")).unwrap();
        std::fs::create_dir_all(tree.join("srv")).unwrap();
        std::fs::copy(busybox, tree.join("bin/busybox")).unwrap();
        std::os::unix::fs::symlink("busybox", tree.join("bin/sh")).unwrap();
        std::fs::write(tree.join("srv/kept"), "old").unwrap();
        bench.backend.config.rootfs = Some(tree.clone());
        let report = bench.backend.check().await.unwrap();
        assert!(report.root.contains("tree"), "{report}");
        let sandbox = bench.start(SandboxSpec::new("tree")).await;
        let seen = says(
            sandbox.as_ref(),
            "cat /srv/kept; echo new > /srv/kept; cat /srv/kept; echo x > /bin/x; busybox ls / /bin",
        )
        .await;
        assert!(seen.starts_with("oldnew\n") && !seen.contains("usr/"), "{seen}");
        assert!(!seen.contains("lower") && !seen.contains("layer"), "{seen}");
        let rights = says(sandbox.as_ref(), "busybox grep CapBnd /proc/self/status").await;
        assert!(rights.ends_with("00000000000000fb"), "{rights}");
        assert!(!sh(sandbox.as_ref(), "busybox mount -t tmpfs x /srv")
            .await
            .success());
        sandbox.delete().await.unwrap();
        assert_eq!(std::fs::read_to_string(tree.join("srv/kept")).unwrap(), "old");
        assert!(!tree.join("bin/x").exists() && bench.leftovers().is_empty());
    });
}

/// Not a test: the process that [`a_killed_parent_leaves_nothing`] kills.
#[test]
#[ignore = "started by another test"]
fn parent_to_be_killed() {
    let Some(state) = std::env::var_os("SANDBOX_TEST_STATE") else {
        return;
    };
    let marker = std::env::var("SANDBOX_TEST_MARKER").unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let backend = ProcessBackend::new(ProcessBackendConfig {
            state_dir: state.into(),
            rootfs: None,
            helper: Some(helper::for_tests()),
            owner: "test".into(),
        });
        let sandbox = backend.start(limited("orphan")).await.unwrap();
        let script = format!("(setsid sleep {marker} &); sleep {marker}");
        sandbox.exec(ExecSpec::shell(script)).await.unwrap();
    });
}

#[test]
fn a_killed_parent_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let marker = unique("9119");
    let mut parent = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "rollout::sandbox::process::tests::parent_to_be_killed",
        ])
        .env("SANDBOX_TEST_STATE", dir.path())
        .env("SANDBOX_TEST_MARKER", &marker)
        .env("LEGORL_AGENT", helper::for_tests())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the sandbox's processes", || {
        processes_with(&format!("sleep\0{marker}")).len() == 2
    });
    parent.kill().unwrap();
    parent.wait().unwrap();
    wait_until("all its processes to end", || processes_with(&marker).is_empty());
    let folders = || std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(folders(), 1);
    assert_eq!(instance::reap(dir.path(), "another").unwrap(), 0);
    assert_eq!(instance::reap(dir.path(), "test").unwrap(), 1);
    assert_eq!(folders(), 0);
}

#[test]
fn what_is_missing_is_named() {
    as_each_user(|| async {
        let mut bench = Bench::new();
        bench.backend.config.rootfs = Some("/no/such/tree".into());
        let error = bench.backend.check().await.unwrap_err().to_string();
        assert!(error.contains("/no/such/tree"), "{error}");
        bench.backend.config.rootfs = None;
        bench.backend.config.helper = Some("/no/such/helper".into());
        let error = bench.backend.check().await.unwrap_err().to_string();
        assert!(
            error.contains("/no/such/helper") && error.contains("make agent"),
            "{error}"
        );
        let mut bench = Bench::new();
        bench.backend.config.state_dir = "/proc/no/state".into();
        let error = bench.backend.check().await.unwrap_err().to_string();
        assert!(error.contains("/proc/no/state"), "{error}");
    });
}

/// Prints medians of 100 sandboxes one after another.
#[test]
#[ignore = "a measurement: cargo test --lib measure_start -- --ignored --nocapture"]
fn measure_start() {
    as_each_user(|| async {
        let bench = Bench::new();
        let limits = bench.backend.limits().await.unwrap();
        let cpu_before = cpu_time();
        let (mut start, mut exec, mut delete) = (Vec::new(), Vec::new(), Vec::new());
        for i in 0..100 {
            let begin = Instant::now();
            let sandbox = bench.start(limited(&format!("s{i}"))).await;
            start.push(begin.elapsed());
            let begin = Instant::now();
            sandbox.exec(ExecSpec::new(["/bin/true"])).await.unwrap();
            exec.push(begin.elapsed());
            let begin = Instant::now();
            sandbox.delete().await.unwrap();
            delete.push(begin.elapsed());
        }
        let cpu = (cpu_time() - cpu_before) / 100;
        println!("processor time of a whole cycle: {cpu:?}");
        for (what, times) in [
            ("start", &mut start),
            ("exec", &mut exec),
            ("delete", &mut delete),
        ] {
            times.sort();
            println!(
                "{what}: median {:?}, 90th percentile {:?} ({limits})",
                times[50], times[90]
            );
        }
    });
}

/// Of this process and of its ended children.
fn cpu_time() -> Duration {
    let of = |who| {
        // SAFETY: getrusage fills the zeroed struct.
        let usage = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            assert_eq!(libc::getrusage(who, &mut usage), 0);
            usage
        };
        let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
        time(usage.ru_utime) + time(usage.ru_stime)
    };
    of(libc::RUSAGE_SELF) + of(libc::RUSAGE_CHILDREN)
}
