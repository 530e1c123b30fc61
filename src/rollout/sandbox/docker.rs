//! Docker. In this version the probe alone: no sandbox runs in a container yet.
//!
//! [`probe`] asks a daemon for its version, and whether it has an image or could pull it. The second
//! question makes the daemon ask the registry for the image's description; nothing is downloaded.

use std::time::Duration;

/// Longest wait for one answer.
pub const DEADLINE: Duration = Duration::from_secs(8);

/// What the daemon answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answers {
    /// Version of the daemon, or why it does not answer.
    pub version: Result<String, String>,
    /// The image that was asked for is there or can be pulled: where it is, or why not. `None` when none
    /// was asked for or the daemon does not answer.
    pub image: Option<Result<String, String>>,
}

/// Asks the daemon at `host` (`unix:///PATH` or `tcp://HOST:PORT`; `None` is this machine's).
#[cfg(feature = "docker")]
pub fn probe(host: Option<&str>, image: Option<&str>) -> Answers {
    client::probe(host, image, DEADLINE)
}

/// Says that this build cannot ask.
#[cfg(not(feature = "docker"))]
pub fn probe(_: Option<&str>, _: Option<&str>) -> Answers {
    Answers {
        version: Err("this build has no Docker client (Cargo feature docker)".into()),
        image: None,
    }
}

#[cfg(feature = "docker")]
mod client {
    use super::Answers;
    use bollard::{errors::Error, Docker};
    use std::{future::Future, time::Duration};

    const LOCAL: &str = "unix:///var/run/docker.sock";

    pub(super) fn probe(host: Option<&str>, image: Option<&str>, deadline: Duration) -> Answers {
        match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime.block_on(ask(host.unwrap_or(LOCAL), image, deadline)),
            Err(error) => Answers {
                version: Err(format!("no runtime for the probe: {error}")),
                image: None,
            },
        }
    }

    async fn ask(host: &str, image: Option<&str>, deadline: Duration) -> Answers {
        let mut answers = Answers {
            version: Err(String::new()),
            image: None,
        };
        let docker = match Docker::connect_with_host(host) {
            Ok(docker) => docker,
            Err(error) => {
                answers.version = Err(format!("{host}: {error}"));
                return answers;
            }
        };
        answers.version = within(deadline, host, docker.version())
            .await
            .map(|version| version.version.unwrap_or_else(|| "of unknown version".to_owned()));
        if let (Ok(_), Some(image)) = (&answers.version, image) {
            answers.image = Some(find(&docker, host, image, deadline).await);
        }
        answers
    }

    async fn find(docker: &Docker, host: &str, image: &str, deadline: Duration) -> Result<String, String> {
        if within(deadline, host, docker.inspect_image(image)).await.is_ok() {
            return Ok("already on the daemon".into());
        }
        within(deadline, host, docker.inspect_registry_image(image, None))
            .await
            .map(|_| "its registry has it".into())
    }

    async fn within<T>(
        deadline: Duration,
        host: &str,
        answer: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, String> {
        match tokio::time::timeout(deadline, answer).await {
            Err(_) => Err(format!("{host} did not answer within {} s", deadline.as_secs())),
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => {
                let mut text = error.to_string();
                let mut cause = std::error::Error::source(&error);
                while let Some(inner) = cause {
                    let next = inner.to_string();
                    if !text.contains(&next) {
                        text = format!("{text}: {next}");
                    }
                    cause = inner.source();
                }
                Err(format!("{host}: {text}"))
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use std::{
            io::{Read, Write},
            os::unix::net::UnixListener,
            thread,
            time::Instant,
        };

        /// A daemon on a socket that gives one answer a path.
        fn daemon(
            answer: impl Fn(&str) -> (u16, &'static str) + Send + 'static,
        ) -> (tempfile::TempDir, String) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("docker.sock");
            let listener = UnixListener::bind(&path).unwrap();
            thread::spawn(move || {
                for stream in listener.incoming() {
                    let Ok(mut stream) = stream else { return };
                    let mut buffer = [0; 4096];
                    while let Ok(n) = stream.read(&mut buffer) {
                        if n == 0 {
                            break;
                        }
                        let request = String::from_utf8_lossy(&buffer[..n]).into_owned();
                        let path = request.split_whitespace().nth(1).unwrap_or("").to_owned();
                        let (code, body) = answer(&path);
                        let head = format!(
                            "HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                            body.len()
                        );
                        if stream.write_all(format!("{head}{body}").as_bytes()).is_err() {
                            break;
                        }
                    }
                }
            });
            let host = format!("unix://{}", path.display());
            (dir, host)
        }

        #[test]
        fn version_and_image_are_asked_for() {
            let (_dir, host) = daemon(|path| match path {
                p if p.contains("/distribution/there") => (
                    200,
                    r#"{"Descriptor":{"mediaType":"m","digest":"sha256:1","size":1},"Platforms":[]}"#,
                ),
                p if p.contains("/distribution/") => (403, r#"{"message":"pull access denied"}"#),
                p if p.contains("/images/") => (404, r#"{"message":"No such image"}"#),
                _ => (200, r#"{"Version":"20.10.24","ApiVersion":"1.41"}"#),
            });
            let ask = |image| probe(Some(&host), image, Duration::from_secs(5));
            assert_eq!(ask(None).version.as_deref(), Ok("20.10.24"));
            assert_eq!(ask(Some("there:1")).image, Some(Ok("its registry has it".into())));
            let denied = ask(Some("secret:1")).image.unwrap().unwrap_err();
            assert!(denied.contains("pull access denied"), "{denied}");
        }

        #[test]
        fn no_daemon_and_a_silent_one_are_said() {
            let absent = probe(
                Some("unix:///nonexistent/docker.sock"),
                None,
                Duration::from_secs(5),
            );
            assert!(absent.version.unwrap_err().contains("/nonexistent/docker.sock"));
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("s");
            let _silent = UnixListener::bind(&path).unwrap();
            let started = Instant::now();
            let host = format!("unix://{}", path.display());
            let silent = probe(Some(&host), None, Duration::from_millis(300))
                .version
                .unwrap_err();
            assert!(silent.contains("did not answer"), "{silent}");
            assert!(started.elapsed() < Duration::from_secs(5));
        }
    }
}
