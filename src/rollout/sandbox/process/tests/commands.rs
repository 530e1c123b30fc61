//! Commands: status, output, limits, cancellation.

use super::*;

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
