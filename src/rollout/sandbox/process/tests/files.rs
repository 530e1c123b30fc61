//! Files in and out, and the Dockerfile.

use super::*;

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
        std::fs::File::create(&big).unwrap().set_len(80 << 20).unwrap();
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
