//! Running a small program to ask it something, with a deadline.

use std::{
    io::{ErrorKind, Read},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// Longest wait for a program's answer.
pub const DEADLINE: Duration = Duration::from_secs(10);

/// Most bytes of an answer that are kept.
const MAX_ANSWER: u64 = 4 << 20;

/// Why a program gave no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It is not installed.
    Missing,
    /// It said no, or did not come to an end.
    Failed(String),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing => f.write_str("it is not installed"),
            Self::Failed(problem) => f.write_str(problem),
        }
    }
}

/// Standard output of a program that ended well within `deadline`.
pub fn ask(program: &str, arguments: &[&str], deadline: Duration) -> Result<String, Refusal> {
    let failed = |problem: String| Refusal::Failed(problem);
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| match error.kind() {
            ErrorKind::NotFound => Refusal::Missing,
            _ => failed(format!("{program} cannot be started: {error}")),
        })?;
    // Both pipes are read while it runs: a program that fills one would otherwise wait for ever.
    let reader = |pipe: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            if let Some(pipe) = pipe {
                // What could be read counts; the exit status says whether it is an answer.
                let _ = pipe.take(MAX_ANSWER).read_to_end(&mut text);
            }
            String::from_utf8_lossy(&text).trim().to_owned()
        })
    };
    let out = reader(child.stdout.take().map(|p| Box::new(p) as Box<dyn Read + Send>));
    let err = reader(child.stderr.take().map(|p| Box::new(p) as Box<dyn Read + Send>));
    let end = Instant::now() + deadline;
    let status = loop {
        match child.try_wait().map_err(|error| failed(error.to_string()))? {
            Some(status) => break status,
            None if Instant::now() > end => {
                // It is ours and it hangs; a second failure changes nothing.
                let _ = child.kill();
                let _ = child.wait();
                return Err(failed(format!(
                    "{program} did not answer within {} s",
                    deadline.as_secs()
                )));
            }
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    let text = |reader: std::thread::JoinHandle<String>| reader.join().unwrap_or_default();
    if status.success() {
        Ok(text(out))
    } else {
        let said = text(err);
        Err(failed(if said.is_empty() {
            format!("{program}: {status}")
        } else {
            said
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_refusals_and_silence_differ() {
        assert_eq!(ask("echo", &["yes"], DEADLINE), Ok("yes".to_owned()));
        assert_eq!(
            ask("no-such-program-at-all", &[], DEADLINE),
            Err(Refusal::Missing)
        );
        assert_eq!(
            ask("sh", &["-c", "echo no >&2; exit 3"], DEADLINE),
            Err(Refusal::Failed("no".into()))
        );
        let started = Instant::now();
        let silent = ask("sleep", &["30"], Duration::from_millis(100))
            .unwrap_err()
            .to_string();
        assert!(
            silent.contains("did not answer") && started.elapsed() < Duration::from_secs(5),
            "{silent}"
        );
    }
}
