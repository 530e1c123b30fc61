//! Probes against a real API server (`kubernetes.sh`: kube-apiserver and etcd, no nodes), through the
//! program that people type. `make test-cluster` builds the server once; without it the tests say SKIP.

use super::support::{bin_dir, root, skip};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, Instant},
};

/// A server for one test; taken down when dropped.
struct Server {
    dir: PathBuf,
}

impl Server {
    fn up(name: &str) -> Option<Self> {
        let server = Self {
            dir: std::env::temp_dir().join(format!("legorl-kubernetes-{name}-{}", std::process::id())),
        };
        if !server.script(&["built"]).status.success() {
            skip(
                "kubernetes",
                "kube-apiserver is not built; `make test-cluster` builds it once",
            );
            return None;
        }
        let output = server.script(&["up", server.dir.to_str().unwrap()]);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Some(server)
    }

    fn script(&self, arguments: &[&str]) -> Output {
        Command::new(root().join("tests/cluster/kubernetes.sh"))
            .args(arguments)
            .output()
            .unwrap()
    }

    /// What preflight says about the cluster of a kubeconfig, and how long the whole command took.
    fn preflight(&self, kubeconfig: &str, namespace: &str) -> (String, Duration) {
        let config = self.dir.join("run.env");
        fs::write(
            &config,
            "PROJECT_NAME=p\nEXP_NAME=e\nMODEL_PATH=m\nTRAIN_FILES=t.parquet\nVAL_FILES=v.parquet\n\
             BACKEND=k8s\nHARBOR_K8S_INLINE_BUILD=true\n",
        )
        .unwrap();
        let started = Instant::now();
        let output = Command::new(bin_dir().join("legorl-rank"))
            .arg("--preflight-only")
            .arg(&config)
            .args([
                "--set",
                &format!("K8S_KUBECONFIG={}", self.dir.join(kubeconfig).display()),
            ])
            .args(["--set", &format!("K8S_NAMESPACE={namespace}")])
            .env("NO_COLOR", "1")
            .current_dir(&self.dir)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // Long findings are wrapped; one line each is easier to look for.
        (text.replace("\n           ", " "), started.elapsed())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let output = self.script(&["down", self.dir.to_str().unwrap()]);
        if !output.status.success() {
            eprintln!("kubernetes.sh down: {}", String::from_utf8_lossy(&output.stderr));
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// The line of `text` that holds all `parts`.
fn line<'t>(text: &'t str, parts: &[&str]) -> &'t str {
    text.lines()
        .find(|line| parts.iter().all(|part| line.contains(part)))
        .unwrap_or_else(|| panic!("no line holds {parts:?}:\n{text}"))
}

fn pods(dir: &Path, port: &str) -> String {
    let token = fs::read_to_string(dir.join("pki/tokens.csv")).unwrap();
    let token = token.split(',').next().unwrap();
    let output = Command::new("curl")
        .args(["--silent", "--max-time", "10", "--cacert"])
        .arg(dir.join("pki/ca.crt"))
        .args(["--header", &format!("Authorization: Bearer {token}")])
        .arg(format!("https://127.0.0.1:{port}/api/v1/pods"))
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_probe_tells_every_state_of_a_real_api_server_apart() {
    let Some(server) = Server::up("states") else {
        return;
    };

    let (admin, _) = server.preflight("admin.kubeconfig", "default");
    line(
        &admin,
        &["OK", "K8S_KUBECONFIG: context test at https://127.0.0.1"],
    );
    line(
        &admin,
        &[
            "OK",
            "Kubernetes API v1.20.2 answers and would create pods in default",
        ],
    );
    let config = fs::read_to_string(server.dir.join("admin.kubeconfig")).unwrap();
    let port = config
        .split("127.0.0.1:")
        .nth(1)
        .unwrap()
        .split('"')
        .next()
        .unwrap();
    let list = pods(&server.dir, port);
    assert!(
        list.contains("\"PodList\"") && !list.contains("legorl-preflight"),
        "nothing was created: {list}"
    );

    let (nowhere, _) = server.preflight("admin.kubeconfig", "no-such-namespace");
    line(
        &nowhere,
        &[
            "FATAL",
            "would not create a pod in K8S_NAMESPACE=no-such-namespace",
            "not found",
        ],
    );

    let (forbidden, _) = server.preflight("forbidden.kubeconfig", "default");
    line(
        &forbidden,
        &[
            "FATAL",
            "would not create a pod",
            "(403)",
            "nobody",
            "[kubernetes-api]",
        ],
    );

    let (stranger, _) = server.preflight("stranger.kubeconfig", "default");
    line(
        &stranger,
        &["FATAL", "Kubernetes API", "does not know these credentials (401)"],
    );

    let (dead, took) = server.preflight("dead.kubeconfig", "default");
    line(&dead, &["FATAL", "Kubernetes API", "refused", "[kubernetes-api]"]);
    assert!(took < Duration::from_secs(20), "{took:?}");

    let (none, _) = server.preflight("nocontext.kubeconfig", "default");
    line(
        &none,
        &[
            "FATAL",
            "nocontext.kubeconfig",
            "current-context is not set",
            "[kubeconfig]",
        ],
    );

    let (broken, _) = server.preflight("broken.kubeconfig", "default");
    line(&broken, &["FATAL", "broken.kubeconfig", "parse", "[kubeconfig]"]);

    let (absent, _) = server.preflight("absent.kubeconfig", "default");
    line(
        &absent,
        &["FATAL", "absent.kubeconfig", "No such file", "[kubeconfig]"],
    );
}
