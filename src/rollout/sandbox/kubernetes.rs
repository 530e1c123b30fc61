//! Kubernetes. In this version the probe alone: no sandbox runs in a pod yet.
//!
//! [`probe`] asks the cluster of a kubeconfig four questions, one after the other, and changes nothing:
//! is the file a kubeconfig, has it a context, does the API answer, would it create a pod of this user
//! (a create request with `dryRun=All`, which passes authorisation, quotas and admission and stores
//! nothing). Each question has [`DEADLINE`].

use std::{path::Path, time::Duration};

/// Longest wait for one answer.
pub const DEADLINE: Duration = Duration::from_secs(8);

/// What the cluster answered. A question that was not reached is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answers {
    /// Context and server of the kubeconfig, or what is wrong with the file.
    pub context: Result<String, String>,
    /// Version of the API server, or why it does not answer.
    pub version: Option<Result<String, String>>,
    /// The pod would be created, or why not.
    pub create: Option<Result<(), String>>,
}

/// Asks the cluster of `kubeconfig`; `image` goes into the pod that is not created.
#[cfg(feature = "k8s")]
pub fn probe(kubeconfig: &Path, namespace: &str, image: &str) -> Answers {
    client::probe(kubeconfig, namespace, image, DEADLINE)
}

/// Says that this build cannot ask.
#[cfg(not(feature = "k8s"))]
pub fn probe(_: &Path, _: &str, _: &str) -> Answers {
    Answers {
        context: Err("this build has no Kubernetes client (Cargo feature k8s)".into()),
        version: None,
        create: None,
    }
}

#[cfg(feature = "k8s")]
mod client {
    use super::Answers;
    use crate::base::files;
    use k8s_openapi::api::core::v1::Pod;
    use kube::{
        api::PostParams,
        config::{KubeConfigOptions, Kubeconfig},
        Api, Client, Config, Error,
    };
    use serde_json::json;
    use std::{future::Future, path::Path, time::Duration};

    pub(super) fn probe(kubeconfig: &Path, namespace: &str, image: &str, deadline: Duration) -> Answers {
        let failed = |context: String| Answers {
            context: Err(context),
            version: None,
            create: None,
        };
        match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime.block_on(ask(kubeconfig, namespace, image, deadline)),
            Err(error) => failed(format!("no runtime for the probe: {error}")),
        }
    }

    async fn ask(kubeconfig: &Path, namespace: &str, image: &str, deadline: Duration) -> Answers {
        let mut answers = Answers {
            context: Err(String::new()),
            version: None,
            create: None,
        };
        let (client, server) = match connect(kubeconfig, deadline).await {
            Ok((client, context, server)) => {
                answers.context = Ok(format!("{context} at {server}"));
                (client, server)
            }
            Err(problem) => {
                answers.context = Err(problem);
                return answers;
            }
        };
        let version = within(deadline, &server, client.apiserver_version()).await;
        let is_up = version.is_ok();
        answers.version = Some(version.map(|info| info.git_version));
        if is_up {
            let pods: Api<Pod> = Api::namespaced(client, namespace);
            let post = PostParams {
                dry_run: true,
                ..PostParams::default()
            };
            let created = match pod(image) {
                Ok(pod) => within(deadline, &server, pods.create(&post, &pod))
                    .await
                    .map(|_| ()),
                Err(problem) => Err(problem),
            };
            answers.create = Some(created);
        }
        answers
    }

    async fn connect(kubeconfig: &Path, deadline: Duration) -> Result<(Client, String, String), String> {
        files::check(kubeconfig).map_err(|error| error.to_string())?;
        let file = Kubeconfig::read_from(kubeconfig).map_err(|error| chain(&error))?;
        let context = file
            .current_context
            .clone()
            .filter(|context| !context.is_empty())
            .ok_or("current-context is not set; choose one with `kubectl config use-context NAME`")?;
        let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
            .await
            .map_err(|error| chain(&error))?;
        config.connect_timeout = Some(deadline);
        config.read_timeout = Some(deadline);
        // One answer is enough: the caller says what it was.
        config.default_retry = false;
        let server = config.cluster_url.to_string();
        let client = Client::try_from(config).map_err(|error| chain(&error))?;
        Ok((client, context, server))
    }

    fn pod(image: &str) -> Result<Pod, String> {
        serde_json::from_value(json!({
            "metadata": {
                "name": format!("legorl-preflight-{}", std::process::id()),
                "labels": {"app.kubernetes.io/managed-by": "legorl"},
            },
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": false,
                "containers": [{"name": "main", "image": image, "command": ["sleep", "1"]}],
            },
        }))
        .map_err(|error| error.to_string())
    }

    async fn within<T>(
        deadline: Duration,
        server: &str,
        answer: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, String> {
        match tokio::time::timeout(deadline, answer).await {
            Err(_) => Err(format!("{server} did not answer within {} s", deadline.as_secs())),
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(Error::Api(status))) => Err(match status.code {
                401 => format!(
                    "{server} does not know these credentials (401): {}",
                    status.message
                ),
                403 => format!("this user may not (403): {}", status.message),
                code => format!("{server} answered {code}: {}", status.message),
            }),
            Ok(Err(error)) => Err(format!("{server}: {}", chain(&error))),
        }
    }

    /// An error with its causes: the outermost one alone is often "ServiceError".
    fn chain(error: &dyn std::error::Error) -> String {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(inner) = cause {
            let next = inner.to_string();
            if !text.contains(&next) {
                text = format!("{text}: {next}");
            }
            cause = inner.source();
        }
        text
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use std::{
            fs,
            io::{Read, Write},
            net::TcpListener,
            thread,
            time::Instant,
        };

        fn kubeconfig(dir: &Path, port: u16) -> std::path::PathBuf {
            let path = dir.join("kubeconfig");
            let text = format!(
                "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
                 clusters: [{{name: k, cluster: {{server: \"http://127.0.0.1:{port}\"}}}}]\n\
                 users: [{{name: u, user: {{token: t}}}}]\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n"
            );
            fs::write(&path, text).unwrap();
            path
        }

        /// A server that gives one answer a request line; returns its port.
        fn server(answer: impl Fn(&str) -> (u16, &'static str) + Send + 'static) -> u16 {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = listener.local_addr().unwrap().port();
            thread::spawn(move || {
                for stream in listener.incoming() {
                    let Ok(mut stream) = stream else { return };
                    let mut buffer = [0; 8192];
                    while let Ok(n) = stream.read(&mut buffer) {
                        if n == 0 {
                            break;
                        }
                        let text = String::from_utf8_lossy(&buffer[..n]).into_owned();
                        let (code, body) = answer(text.lines().next().unwrap_or(""));
                        let reply = format!(
                            "HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                            body.len()
                        );
                        if stream.write_all(reply.as_bytes()).is_err() {
                            break;
                        }
                    }
                }
            });
            port
        }

        const VERSION: &str = r#"{"major":"1","minor":"31","gitVersion":"v1.31.0","gitCommit":"c",
            "gitTreeState":"clean","buildDate":"d","goVersion":"g","compiler":"gc","platform":"linux/amd64"}"#;

        #[test]
        fn a_kubeconfig_is_a_file() {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("kubeconfig");
            let made = std::process::Command::new("mkfifo").arg(&path).status();
            assert!(made.unwrap().success());
            for (path, what) in [(path.as_path(), "a named pipe"), (dir.path(), "a folder")] {
                let problem = probe(path, "boxes", "busybox", Duration::from_secs(10)).context;
                assert!(problem.unwrap_err().contains(what));
            }
        }

        #[test]
        fn pods_are_asked_for_with_a_dry_run_and_a_refusal_is_told() {
            let dir = tempfile::tempdir().unwrap();
            let ask = |create: (u16, &'static str)| {
                let port = server(move |line| {
                    if line.starts_with("GET /version ") {
                        (200, VERSION)
                    } else {
                        assert!(line.starts_with("POST /api/v1/namespaces/boxes/pods?"), "{line}");
                        assert!(line.contains("dryRun=All"), "{line}");
                        create
                    }
                });
                probe(
                    &kubeconfig(dir.path(), port),
                    "boxes",
                    "busybox",
                    Duration::from_secs(10),
                )
            };
            let made = ask((201, r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p"}}"#));
            assert_eq!(made.version, Some(Ok("v1.31.0".into())));
            assert_eq!(made.create, Some(Ok(())));
            let refused = ask((
                403,
                r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,
                    "message":"pods is forbidden: User \"nobody\" cannot create resource \"pods\""}"#,
            ));
            let problem = refused.create.unwrap().unwrap_err();
            assert!(
                problem.contains("(403)") && problem.contains("nobody"),
                "{problem}"
            );
        }

        #[test]
        fn a_server_that_never_answers_costs_one_deadline() {
            let dir = tempfile::tempdir().unwrap();
            let silent = TcpListener::bind("127.0.0.1:0").unwrap();
            let path = kubeconfig(dir.path(), silent.local_addr().unwrap().port());
            let started = Instant::now();
            let answers = probe(&path, "default", "busybox", Duration::from_millis(300));
            assert!(
                started.elapsed() < Duration::from_secs(5),
                "{:?}",
                started.elapsed()
            );
            assert!(answers.context.is_ok() && answers.create.is_none());
            assert!(answers.version.unwrap().is_err());
        }

        #[test]
        fn a_file_that_is_none_is_said_to_be_none() {
            let dir = tempfile::tempdir().unwrap();
            let broken = dir.path().join("broken");
            fs::write(&broken, "apiVersion: v1\nclusters: [unclosed\n").unwrap();
            let ask = |path: &Path| probe(path, "default", "busybox", Duration::from_secs(1)).context;
            assert!(ask(&broken).unwrap_err().contains("parse"));
            assert!(ask(&dir.path().join("absent"))
                .unwrap_err()
                .contains("No such file"));
            fs::write(&broken, "apiVersion: v1\nkind: Config\n").unwrap();
            assert!(ask(&broken).unwrap_err().contains("current-context is not set"));
        }
    }
}
