//! Runs one command of the tool in a fresh shell.

use crate::poll::wait_readable;
use legorl_agent::protocol::CHUNK;
use legorl_agent::tool::{OutputWindow, ToolExit, OUTPUT_CAP_BYTES};
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Largest pipe that an ordinary user may make (`/proc/sys/fs/pipe-max-size`).
const MAX_PIPE_BYTES: u64 = 1 << 20;

/// Runs `command` with bash, or sh where there is no bash. The shell's process group is killed when it
/// takes longer than `timeout`; what it left in the background lives on.
pub fn run(command: &str, timeout: Duration) -> io::Result<(OutputWindow, ToolExit)> {
    let deadline = Instant::now() + timeout;
    let (mut output, child) = spawn(command)?;
    let group = child.id() as i32;
    let ended = announce_end(child)?;

    let mut window = OutputWindow::new(OUTPUT_CAP_BYTES);
    let mut chunk = vec![0; CHUNK];
    let mut open = true;
    loop {
        let fds = [open.then(|| output.as_fd()), Some(ended.as_fd())];
        let [readable, dead] = wait_readable(fds, Some(deadline))?;
        if readable {
            open = read_chunk(&mut output, &mut chunk, &mut window)?;
        }
        if dead {
            break;
        }
        if Instant::now() >= deadline {
            // SAFETY: kill with integer arguments; the group exists until the child was waited for.
            unsafe { libc::kill(-group, libc::SIGKILL) };
            return Ok((window, ToolExit::TimedOut(timeout.as_secs())));
        }
    }
    // The rest of the output is in the pipe; more than a pipe holds comes from a background process.
    let enough = window.total() + MAX_PIPE_BYTES;
    while open && window.total() < enough {
        if !wait_readable([Some(output.as_fd())], Some(Instant::now()))?[0] {
            break;
        }
        open = read_chunk(&mut output, &mut chunk, &mut window)?;
    }
    if open {
        keep_open(output);
    }
    let mut code = [0; 4];
    let mut ended = ended;
    ended.read_exact(&mut code)?;
    Ok((window, ToolExit::Code(i32::from_le_bytes(code))))
}

fn spawn(command: &str) -> io::Result<(PipeReader, Child)> {
    let (output, out) = io::pipe()?;
    let shell = ["/bin/bash", "/usr/bin/bash"]
        .into_iter()
        .find(|p| Path::new(p).exists())
        .unwrap_or("/bin/sh");
    let child = Command::new(shell)
        .args(["-c", command])
        // Commands of the policy have no business with the session's secret.
        .env_remove("OPENAI_API_KEY")
        .env_remove("OPENAI_BASE_URL")
        .stdin(Stdio::null())
        .stderr(out.try_clone()?)
        .stdout(out)
        .process_group(0)
        .spawn()?;
    Ok((output, child))
}

/// A pipe on which the exit code appears when the child has ended.
fn announce_end(mut child: Child) -> io::Result<PipeReader> {
    let (ended, mut end) = io::pipe()?;
    thread::spawn(move || {
        let code = match child.wait() {
            Ok(status) => status.code().or(status.signal().map(|s| 128 + s)).unwrap_or(-1),
            Err(_) => -1,
        };
        // The reader has gone when the command was killed for its time.
        let _ = end.write_all(&code.to_le_bytes());
    });
    Ok(ended)
}

fn read_chunk(output: &mut PipeReader, chunk: &mut [u8], window: &mut OutputWindow) -> io::Result<bool> {
    let n = output.read(chunk)?;
    window.push(&chunk[..n]);
    Ok(n > 0)
}

/// A background process that writes is not to be killed by SIGPIPE.
fn keep_open(mut output: PipeReader) {
    thread::spawn(move || io::copy(&mut output, &mut io::sink()));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(command: &str, timeout: Duration) -> String {
        let (window, exit) = run(command, timeout).unwrap();
        window.tool_result(exit)
    }

    #[test]
    fn output_status_and_signals_are_reported() {
        let long = Duration::from_secs(20);
        assert_eq!(
            result("echo out; echo err >&2; exit 3", long),
            "out\nerr\n[exit 3]"
        );
        assert_eq!(result("kill -9 $$", long), "[exit 137]");
        assert_eq!(result("true", long), "[no output]");
    }

    #[test]
    fn a_command_that_never_ends_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let pid_file = dir.path().join("pid");
        let command = format!("sleep 600 & echo $! > {}; echo began; wait", pid_file.display());
        assert_eq!(
            result(&command, Duration::from_secs(1)),
            "began\n[killed after 1 s]"
        );
        let pid = std::fs::read_to_string(pid_file).unwrap();
        let stat = || std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
        let deadline = Instant::now() + Duration::from_secs(20);
        while stat().is_ok_and(|s| !s.contains(") Z ")) {
            assert!(
                Instant::now() < deadline,
                "the child of a killed command still runs"
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_flood_of_output_is_bounded() {
        let (window, exit) = run("head -c 52428800 /dev/zero | tr '\\0' x", Duration::from_secs(60)).unwrap();
        assert_eq!((window.total(), exit), (52_428_800, ToolExit::Code(0)));
        assert!(window.text().len() < 2 * OUTPUT_CAP_BYTES);
    }

    #[test]
    fn a_background_process_does_not_delay_the_result() {
        // Would take until the time limit if the end of the pipe was waited for.
        let (window, exit) = run("sleep 30 & echo started", Duration::from_secs(25)).unwrap();
        assert_eq!((window.text().as_str(), exit), ("started\n", ToolExit::Code(0)));
    }
}
