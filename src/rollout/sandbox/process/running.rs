//! A running process sandbox.

use super::bwrap;
use super::channel::{Channel, Event, Pending};
use super::instance::{start_time, Folder, Instance};
use super::limits::Group;
use crate::rollout::sandbox::dockerfile::Image;
use crate::rollout::sandbox::{ExecResult, ExecSpec, LogFile, Sandbox, SandboxError, SandboxSpec};
use async_trait::async_trait;
use legorl_agent::protocol::{Reply, Request, CHUNK, HELPER_PATH};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Component, Path, PathBuf};
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How much longer than its limit a command may take before the sandbox counts as hung.
const GRACE: Duration = Duration::from_secs(30);
/// Time for all processes of a sandbox to be gone.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// What exists outside of the sandbox's own view; ended and removed when dropped.
pub struct Body {
    child: Child,
    control: UnixStream,
    folder: Option<Folder>,
    group: Option<Group>,
    ended: bool,
    /// The thread that started the child, and the lock that keeps reapers away, live at least as long.
    _instance: Arc<Instance>,
}

impl Body {
    /// Takes charge of a started bwrap.
    pub fn new(
        child: Child,
        control: UnixStream,
        folder: Folder,
        group: Option<Group>,
        instance: Arc<Instance>,
    ) -> Self {
        let pid = child.id() as i32;
        let record = format!("{pid} {}", start_time(pid).unwrap_or_default());
        if let Err(e) = folder.record("pid", &record) {
            tracing::warn!(error = ?e, "sandbox cannot be reaped if this process is killed");
        }
        Self {
            child,
            control,
            folder: Some(folder),
            group,
            ended: false,
            _instance: instance,
        }
    }

    /// Ends every process, then deletes files and groups. Blocks.
    fn end(&mut self, name: &str) -> Result<(), SandboxError> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        // The first process exits when its socket closes, and takes the others with it.
        self.control.shutdown(Shutdown::Both).ok();
        let begin = Instant::now();
        let mut pause = Duration::from_micros(200);
        while matches!(self.child.try_wait(), Ok(None)) {
            if begin.elapsed() > END_TIMEOUT / 2 {
                // bwrap's end kills the first process by its parent-death signal.
                self.child.kill().ok();
            }
            if begin.elapsed() > END_TIMEOUT {
                return Err(SandboxError::Timeout {
                    name: name.into(),
                    what: format!("process {} to end", self.child.id()),
                    waited: begin.elapsed(),
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        drop(self.group.take());
        match self.folder.take() {
            Some(folder) => folder.remove(),
            None => Ok(()),
        }
    }
}

/// See [`super`].
pub struct ProcessSandbox {
    name: String,
    body: Option<Body>,
    channel: Arc<Channel>,
    env: BTreeMap<String, String>,
    workdir: String,
    /// When the sandbox has ended itself for sure.
    end: Instant,
}

impl ProcessSandbox {
    /// A sandbox whose first process has not answered yet.
    pub fn new(spec: &SandboxSpec, body: Body, channel: Arc<Channel>) -> Self {
        let mut sandbox = Self {
            name: spec.name.clone(),
            body: Some(body),
            channel,
            env: BTreeMap::new(),
            workdir: String::new(),
            end: Instant::now() + spec.wall_limit + GRACE,
        };
        sandbox.adopt(Image::default(), spec);
        sandbox
    }

    /// Takes environment and working directory from the Dockerfile, under those of the specification.
    pub fn adopt(&mut self, image: Image, spec: &SandboxSpec) {
        let base = [
            (
                "PATH",
                "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            ),
            ("HOME", "/root"),
            ("LANG", "C.UTF-8"),
            ("TERM", "dumb"),
        ];
        self.env = base.map(|(k, v)| (k.to_string(), v.to_string())).into();
        self.env.extend(image.env);
        self.env.extend(spec.env.clone());
        self.workdir = spec
            .workdir
            .clone()
            .or(image.workdir)
            .unwrap_or_else(|| "/".into());
    }

    /// The working directory exists from the start.
    pub async fn make_workdir(&self) -> Result<(), SandboxError> {
        self.make_dir(&self.workdir).await
    }

    /// Why the first process never answered; ends what is left.
    pub async fn boot_failure(mut self) -> SandboxError {
        let log = self
            .body
            .as_ref()
            .and_then(|b| b.folder.as_ref())
            .map(|f| f.path().join("bwrap.log"))
            .and_then(|path| fs::read_to_string(path).ok())
            .unwrap_or_default();
        let name = self.name.clone();
        if let Err(e) = self.finish().await {
            tracing::warn!(sandbox = %name, error = ?e, "what did not start could not be removed");
        }
        bwrap::explain(&name, &log)
    }

    async fn finish(&mut self) -> Result<(), SandboxError> {
        let Some(mut body) = self.body.take() else {
            return Ok(());
        };
        let name = self.name.clone();
        super::blocking("ending a sandbox", move || body.end(&name)).await
    }

    fn gone(&self, during: impl Into<String>) -> SandboxError {
        SandboxError::Ended {
            name: self.name.clone(),
            during: during.into(),
            reason: self.channel.end_reason(),
        }
    }

    fn refused(&self, action: impl Into<String>, problem: impl Into<String>) -> SandboxError {
        SandboxError::Refused {
            name: self.name.clone(),
            action: action.into(),
            problem: problem.into(),
        }
    }

    async fn send(&self, request: &Pending, message: &Request, during: &str) -> Result<(), SandboxError> {
        match request.send(message).await {
            Ok(Some(())) => Ok(()),
            Ok(None) => Err(self.gone(during)),
            Err(e) => Err(self.refused(during, e.to_string())),
        }
    }

    /// Puts a deadline on a request of the sandbox.
    async fn within<T>(
        &self,
        limit: Option<Duration>,
        what: &str,
        work: impl std::future::Future<Output = Result<T, SandboxError>>,
    ) -> Result<T, SandboxError> {
        let left = self.end.saturating_duration_since(Instant::now());
        let waited = limit.map_or(left, |l| left.min(l + GRACE));
        match tokio::time::timeout(waited, work).await {
            Ok(result) => result,
            Err(_) => Err(SandboxError::Timeout {
                name: self.name.clone(),
                what: what.into(),
                waited,
            }),
        }
    }

    async fn follow(
        &self,
        mut request: Pending,
        log: Option<LogFile>,
        during: &str,
    ) -> Result<ExecResult, SandboxError> {
        let mut sink = log.map(LogSink::create).transpose()?;
        loop {
            match request.next().await {
                Some(Event::Raw(bytes)) => {
                    if let Some(sink) = &mut sink {
                        sink.write(&bytes)?;
                    }
                }
                Some(Event::Reply(Reply::Exit {
                    code,
                    signal,
                    timed_out,
                    oom_killed,
                    pids_limit_hit,
                    tail,
                    output_bytes,
                })) => {
                    request.kill_on_drop = false;
                    if let Some(sink) = sink {
                        sink.finish(output_bytes, &tail)?;
                    }
                    return Ok(ExecResult {
                        exit_code: code,
                        signal,
                        timed_out,
                        oom_killed,
                        pids_limit_hit,
                        tail,
                        output_bytes,
                    });
                }
                Some(Event::Reply(Reply::Failed { problem })) => {
                    request.kill_on_drop = false;
                    return Err(self.refused(during, problem));
                }
                Some(Event::Reply(other)) => {
                    return Err(self.refused(during, format!("unexpected answer {other:?}")));
                }
                None => return Err(self.gone(during)),
            }
        }
    }

    async fn done(&self, request: &mut Pending, during: &str) -> Result<(), SandboxError> {
        match request.next().await {
            Some(Event::Reply(Reply::Done)) => Ok(()),
            Some(Event::Reply(Reply::Failed { problem })) => Err(self.refused(during, problem)),
            Some(other) => Err(self.refused(during, format!("unexpected answer {other:?}"))),
            None => Err(self.gone(during)),
        }
    }

    fn counters(&self) -> (u64, u64) {
        let group = self.body.as_ref().and_then(|b| b.group.as_ref());
        group.map_or((0, 0), |g| (g.oom_kills(), g.refused_forks()))
    }
}

#[async_trait]
impl Sandbox for ProcessSandbox {
    async fn exec(&self, spec: ExecSpec) -> Result<ExecResult, SandboxError> {
        let program = spec.argv.first().cloned().unwrap_or_default();
        let during = format!("running `{program}`");
        if let Some(user) = spec.user.as_deref().filter(|u| !["root", "0"].contains(u)) {
            return Err(self.refused(
                during,
                format!("user `{user}`: the process backend has the one user root"),
            ));
        }
        let mut env = self.env.clone();
        env.extend(spec.env);
        let command = Request::Exec {
            argv: spec.argv,
            env: env.into_iter().collect(),
            cwd: spec.cwd.unwrap_or_else(|| self.workdir.clone()),
            timeout_ms: spec.timeout.map(|t| t.as_millis() as u64),
            forward_bytes: spec.log.as_ref().map_or(0, |l| l.cap_bytes),
        };
        let before = self.counters();
        let mut request = self.channel.open();
        request.kill_on_drop = true;
        let run = async {
            self.send(&request, &command, &during).await?;
            self.follow(request, spec.log, &during).await
        };
        let mut result = self
            .within(spec.timeout, &format!("`{program}` to end"), run)
            .await?;
        let after = self.counters();
        result.oom_killed |= after.0 > before.0;
        result.pids_limit_hit |= after.1 > before.1;
        Ok(result)
    }

    async fn upload(&self, local: &Path, remote: &str) -> Result<(), SandboxError> {
        let during = format!("uploading `{}` to `{remote}`", local.display());
        let remote = self.absolute(remote);
        let mut request = self.channel.open();
        self.send(&request, &Request::Upload { path: remote }, &during)
            .await?;
        let (sender, local) = (request.blocking_sender(), local.to_path_buf());
        let work = async {
            let sent = super::blocking("reading files to upload", move || {
                let outcome = send_tree(&local, &|m| sender.message(m), &|b| sender.raw(b));
                // Also after a failure, so that the sandbox forgets the upload.
                sender.message(&Request::End).ok();
                outcome
            })
            .await;
            // What the sandbox says explains more than a broken pipe does.
            match (sent, self.done(&mut request, &during).await) {
                (Err(e @ SandboxError::Io { .. }), Ok(())) => Err(e),
                (_, answer) => answer,
            }
        };
        self.within(None, &during, work).await
    }

    async fn download(&self, remote: &str, local: &Path) -> Result<(), SandboxError> {
        let during = format!("downloading `{remote}`");
        let path = self.absolute(remote);
        let mut request = self.channel.open();
        self.send(&request, &Request::Download { path }, &during).await?;
        let work = async {
            let mut file: Option<(PathBuf, File)> = None;
            loop {
                match request.next().await {
                    Some(Event::Reply(Reply::Dir { path })) => {
                        file = None;
                        let path = below(local, &path).map_err(|p| self.refused(during.as_str(), p))?;
                        fs::create_dir_all(&path).map_err(|e| SandboxError::io("create", path, e))?;
                    }
                    Some(Event::Reply(Reply::File { path })) => {
                        let path = below(local, &path).map_err(|p| self.refused(during.as_str(), p))?;
                        let new = File::create(&path).map_err(|e| SandboxError::io("create", &path, e))?;
                        file = Some((path, new));
                    }
                    Some(Event::Raw(bytes)) => {
                        if let Some((path, file)) = &mut file {
                            file.write_all(&bytes)
                                .map_err(|e| SandboxError::io("write", path.as_path(), e))?;
                        }
                    }
                    Some(Event::Reply(Reply::Done)) => return Ok(()),
                    Some(Event::Reply(Reply::Failed { problem })) => {
                        return Err(self.refused(during.as_str(), problem))
                    }
                    Some(Event::Reply(other)) => {
                        return Err(self.refused(during.as_str(), format!("unexpected answer {other:?}")))
                    }
                    None => return Err(self.gone(during.as_str())),
                }
            }
        };
        self.within(None, &during, work).await
    }

    fn helper(&self) -> Option<&str> {
        Some(HELPER_PATH)
    }

    async fn delete(mut self: Box<Self>) -> Result<(), SandboxError> {
        self.finish().await
    }

    async fn make_dir(&self, remote: &str) -> Result<(), SandboxError> {
        let during = format!("making the folder `{remote}`");
        let path = self.absolute(remote);
        let mut request = self.channel.open();
        let folder = Request::Dir {
            path: String::new(),
            mode: 0o755,
        };
        let work = async {
            for message in [Request::Upload { path }, folder, Request::End] {
                self.send(&request, &message, &during).await?;
            }
            self.done(&mut request, &during).await
        };
        self.within(None, &during, work).await
    }
}

impl ProcessSandbox {
    /// Relative paths begin at the working directory.
    fn absolute(&self, remote: &str) -> String {
        if remote.starts_with('/') {
            remote.into()
        } else {
            format!("{}/{remote}", self.workdir.trim_end_matches('/'))
        }
    }
}

impl Drop for ProcessSandbox {
    fn drop(&mut self) {
        let Some(mut body) = self.body.take() else { return };
        let name = self.name.clone();
        let end = move || {
            if let Err(e) = body.end(&name) {
                tracing::warn!(sandbox = %name, error = ?e, "dropped sandbox not removed");
            }
        };
        // A drop must not block an async thread. Where no thread can be had, the closure is dropped here
        // and the body with it, which ends the sandbox as well.
        std::thread::Builder::new().spawn(end).ok();
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if let Err(e) = self.end("dropped") {
            tracing::warn!(error = ?e, "sandbox not removed");
        }
    }
}

/// A path of a download, kept below `local` whatever the sandbox says.
fn below(local: &Path, relative: &str) -> Result<PathBuf, String> {
    let path = Path::new(relative);
    if path.components().all(|c| matches!(c, Component::Normal(_))) {
        Ok(if relative.is_empty() {
            local.to_path_buf()
        } else {
            local.join(path)
        })
    } else {
        Err(format!("`{relative}` leads out of the download"))
    }
}

/// Sends a file, or a folder with all it holds. Links are sent as links.
fn send_tree(
    local: &Path,
    message: &dyn Fn(&Request) -> io::Result<()>,
    raw: &dyn Fn(&[u8]) -> io::Result<()>,
) -> Result<(), SandboxError> {
    // The top is followed, so that a linked folder may be uploaded.
    let top = fs::metadata(local).map_err(|e| SandboxError::io("upload", local, e))?;
    let mut pending = vec![(local.to_path_buf(), String::new(), top)];
    while let Some((path, relative, meta)) = pending.pop() {
        let failed = |e| SandboxError::io("upload", &path, e);
        let mode = meta.permissions().mode() & 0o7777;
        if meta.is_dir() {
            let dir = Request::Dir {
                path: relative.clone(),
                mode,
            };
            message(&dir).map_err(failed)?;
            for entry in fs::read_dir(&path).map_err(failed)? {
                let entry = entry.map_err(failed)?;
                let name = entry.file_name();
                let name = name.to_str().ok_or_else(|| {
                    let problem = "a file name that is not UTF-8";
                    SandboxError::io(
                        "upload",
                        entry.path(),
                        io::Error::new(io::ErrorKind::InvalidData, problem),
                    )
                })?;
                let below = if relative.is_empty() {
                    name.into()
                } else {
                    format!("{relative}/{name}")
                };
                pending.push((entry.path(), below, entry.metadata().map_err(failed)?));
            }
        } else if meta.is_symlink() {
            let target = fs::read_link(&path).map_err(failed)?;
            let target = target.to_string_lossy().into_owned();
            let link = Request::Link {
                path: relative,
                target,
            };
            message(&link).map_err(failed)?;
        } else if meta.is_file() {
            let mut file = File::open(&path).map_err(failed)?;
            let begin = Request::File { path: relative, mode };
            message(&begin).map_err(failed)?;
            let mut chunk = vec![0; CHUNK];
            loop {
                let n = file.read(&mut chunk).map_err(failed)?;
                if n == 0 {
                    break;
                }
                raw(&chunk[..n]).map_err(failed)?;
            }
        }
    }
    Ok(())
}

/// A command's log on the host, bounded.
struct LogSink {
    path: PathBuf,
    file: File,
    written: u64,
}

impl LogSink {
    fn create(log: LogFile) -> Result<Self, SandboxError> {
        let file = File::create(&log.path).map_err(|e| SandboxError::io("create", &log.path, e))?;
        Ok(Self {
            path: log.path,
            file,
            written: 0,
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), SandboxError> {
        self.written += bytes.len() as u64;
        let written = self.file.write_all(bytes);
        written.map_err(|e| SandboxError::io("write", &self.path, e))
    }

    /// Adds what is known of the output that was cut: a note, and its tail.
    fn finish(mut self, output_bytes: u64, tail: &str) -> Result<(), SandboxError> {
        let cut = output_bytes.saturating_sub(self.written);
        if cut == 0 {
            return Ok(());
        }
        let mut from = tail.len().saturating_sub(cut as usize);
        while !tail.is_char_boundary(from) {
            from += 1;
        }
        let note = format!(
            "\n[output cut: {output_bytes} bytes in all, {} kept; the last {} follow]\n{}",
            self.written,
            tail.len() - from,
            &tail[from..]
        );
        self.write(note.as_bytes())
    }
}
