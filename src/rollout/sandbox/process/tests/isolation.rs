//! What a sandbox can see, write and reach.

use super::*;

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
        check_network(Bench::new()).await;
        check_network(Bench::with_folders().await).await;
    });
}

async fn check_network(bench: Bench) {
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
        // Before Linux 6.6, memory could not hold the upper layer of an overlay.
        let mut bench = Bench::on(tempfile::tempdir().unwrap());
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

/// Mounts are seen, cannot be changed, run programs, and are not hidden by the folders they lie in.
#[test]
fn mounts_are_read_only() {
    as_each_user(|| async {
        for bench in [Bench::new(), Bench::with_folders().await] {
            let tree = bench.dir.path().join("tree");
            std::fs::create_dir_all(tree.join("bin")).unwrap();
            std::fs::write(tree.join("bin/tool"), "#!/bin/sh\necho ran\n").unwrap();
            std::fs::write(tree.join("note"), "before").unwrap();
            use std::os::unix::fs::PermissionsExt;
            let mode = std::fs::Permissions::from_mode(0o4755);
            std::fs::set_permissions(tree.join("bin/tool"), mode).unwrap();
            let mut spec = SandboxSpec::new("mounts");
            spec.mounts = vec![
                ReadOnlyMount {
                    host: tree.clone(),
                    inside: "/opt/legorl/runtimes/tool-1".into(),
                },
                ReadOnlyMount {
                    host: tree.join("note"),
                    inside: "/etc/deep/note".into(),
                },
            ];
            let sandbox = bench.start(spec).await;
            let script = "/opt/legorl/runtimes/tool-1/bin/tool; cat /etc/deep/note; echo; ls -d /layer 2>/dev/null
                for path in /opt/legorl/runtimes/tool-1/new /opt/legorl/runtimes/tool-1/note /etc/deep/note; do
                    (echo after > $path) 2>/dev/null && echo wrote $path
                done
                rm -f /opt/legorl/runtimes/tool-1/note 2>/dev/null && echo removed
                mount -o remount,rw /opt/legorl/runtimes/tool-1 2>/dev/null && echo remounted
                grep ' /opt/legorl/runtimes/tool-1 ro,' /proc/self/mountinfo | grep -c nosuid";
            let said = says(sandbox.as_ref(), script).await;
            assert_eq!(said, "ran\nbefore\n1");
            assert_eq!(std::fs::read_to_string(tree.join("note")).unwrap(), "before");
            assert!(!tree.join("new").exists());
            sandbox.delete().await.unwrap();
            assert!(bench.leftovers().is_empty());
            assert!(tree.join("bin/tool").exists(), "deleted with the sandbox");
        }
        let bench = Bench::new();
        let mut spec = SandboxSpec::new("missing");
        spec.mounts = vec![ReadOnlyMount {
            host: "/no/such/tree".into(),
            inside: "/opt/x".into(),
        }];
        let error = bench.backend.start(spec).await.err().unwrap().to_string();
        assert!(error.contains("/no/such/tree"), "{error}");
    });
}
