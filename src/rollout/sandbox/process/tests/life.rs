//! Limits of a sandbox, its end, and what is left when its owner is killed.

use super::*;

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
            "rollout::sandbox::process::tests::life::parent_to_be_killed",
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
