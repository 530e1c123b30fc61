//! Folders of sandboxes, and how those of dead processes are found.
//!
//! ```text
//! <state_dir>/<owner>-<pid>-<random>/   one a backend
//!     lock        flock held as long as the process lives
//!     owner       text
//!     .base/      see `root`
//!     .trash/     folders of ended sandboxes, until a thread has deleted them
//!     <sandbox>/  files of the sandbox, bwrap.log, and `record`: labels, pid with start time, cgroups
//! ```
//!
//! A folder whose lock can be taken belongs to a dead process. Reaping ends what the records name, if
//! the process is still the one that was meant, and removes the folder. Folders of other
//! owners and of living processes are never touched.

use super::limits;
use super::spawner::Spawner;
use crate::rollout::sandbox::{SandboxError, SandboxSpec};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

const RECORD: &str = "record";
const TRASH: &str = ".trash";

/// The folder of one backend in one process.
#[derive(Debug)]
pub struct Instance {
    path: PathBuf,
    tag: String,
    spawner: Spawner,
    sweeper: Option<Sweeper>,
    _lock: File,
}

/// Deletes folders in the background: a file system may take milliseconds for each folder, and nothing
/// waits for it.
#[derive(Debug)]
struct Sweeper {
    queue: mpsc::Sender<Option<PathBuf>>,
    thread: thread::JoinHandle<()>,
}

impl Sweeper {
    fn start() -> io::Result<Self> {
        let (queue, folders) = mpsc::channel::<Option<PathBuf>>();
        let sweep = move || {
            // `None` says that no more will come.
            while let Ok(Some(folder)) = folders.recv() {
                if let Err(e) = remove_tree(&folder) {
                    tracing::warn!(folder = %folder.display(), error = ?e, "sandbox folder not removed");
                }
            }
        };
        let thread = thread::Builder::new()
            .name("sandbox-sweeper".into())
            .spawn(sweep)?;
        Ok(Self { queue, thread })
    }
}

impl Instance {
    /// Makes the folder and takes its lock.
    pub fn create(state_dir: &Path, owner: &str) -> Result<Self, SandboxError> {
        check_name(owner, "owner")?;
        make_dirs(state_dir)?;
        let state_dir = state_dir
            .canonicalize()
            .map_err(|e| SandboxError::io("find", state_dir, e))?;
        let tag = format!("{owner}-{}-{:08x}", std::process::id(), random()?);
        // Hidden until it is locked, so that a reaper never sees it without an owner.
        let hidden = state_dir.join(format!(".{tag}"));
        make_dirs(&hidden)?;
        let file = hidden.join("owner");
        fs::write(&file, owner).map_err(|e| SandboxError::io("write", &file, e))?;
        make_dirs(&hidden.join(TRASH))?;
        let lock_path = hidden.join("lock");
        let lock = File::create(&lock_path).map_err(|e| SandboxError::io("create", &lock_path, e))?;
        if !try_lock(&lock) {
            let error = io::Error::last_os_error();
            return Err(SandboxError::io("lock", lock_path, error));
        }
        let path = state_dir.join(&tag);
        let no_thread = |e| SandboxError::io("start a thread for", &path, e);
        fs::rename(&hidden, &path).map_err(|e| SandboxError::io("rename", &hidden, e))?;
        let (spawner, sweeper) = (
            Spawner::new().map_err(no_thread)?,
            Sweeper::start().map_err(no_thread)?,
        );
        Ok(Self {
            path,
            tag,
            spawner,
            sweeper: Some(sweeper),
            _lock: lock,
        })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Name that is unique on this machine.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    fn sandboxes(&self) -> Vec<PathBuf> {
        sandboxes_in(&self.path).unwrap_or_default()
    }

    /// Starts the processes of this backend.
    pub fn spawner(&self) -> &Spawner {
        &self.spawner
    }

    /// Makes the folder of a sandbox.
    pub fn sandbox(&self, spec: &SandboxSpec) -> Result<Folder, SandboxError> {
        check_name(&spec.name, &spec.name)?;
        let path = self.path.join(&spec.name);
        if let Err(e) = fs::DirBuilder::new().mode(0o755).create(&path) {
            return Err(if e.kind() == io::ErrorKind::AlreadyExists {
                SandboxError::Spec {
                    name: spec.name.clone(),
                    problem: "a sandbox of this name is running".into(),
                }
            } else {
                SandboxError::io("create", path, e)
            });
        }
        let folder = Folder {
            trash: self
                .path
                .join(TRASH)
                .join(format!("{}-{:08x}", spec.name, random()?)),
            sweep: self.sweeper.as_ref().map(|s| s.queue.clone()),
            path,
        };
        let labels = &spec.labels;
        folder.record("run", &labels.run)?;
        folder.record("trial", &labels.trial)?;
        folder.record("owner", &labels.owner)?;
        Ok(folder)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if let Some(Sweeper { queue, thread }) = self.sweeper.take() {
            queue.send(None).ok();
            thread.join().ok();
        }
        // Else a later run reaps it.
        if self.sandboxes().is_empty() {
            if let Err(e) = remove_tree(&self.path) {
                tracing::warn!(folder = %self.path.display(), error = ?e, "state folder not removed");
            }
        }
    }
}

/// The folder of one sandbox; removed when dropped.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    trash: PathBuf,
    sweep: Option<mpsc::Sender<Option<PathBuf>>>,
}

impl Folder {
    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a line to the record, for whoever finds the folder later.
    pub fn record(&self, key: &str, value: &str) -> Result<(), SandboxError> {
        let path = self.path.join(RECORD);
        let line = format!("{key}={}\n", value.replace('\n', " "));
        let file = OpenOptions::new().create(true).append(true).open(&path);
        file.and_then(|mut f| f.write_all(line.as_bytes()))
            .map_err(|e| SandboxError::io("write", path, e))
    }

    /// Takes the folder away at once; its files are deleted in the background.
    pub fn remove(&self) -> Result<(), SandboxError> {
        match fs::rename(&self.path, &self.trash) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(|e| SandboxError::io("move away", &self.path, e))?,
        }
        match &self.sweep {
            Some(queue) if queue.send(Some(self.trash.clone())).is_ok() => Ok(()),
            _ => remove_tree(&self.trash),
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(e) = self.remove() {
            tracing::warn!(folder = %self.path.display(), error = ?e, "sandbox folder not removed");
        }
    }
}

/// See the module.
pub fn reap(state_dir: &Path, owner: &str) -> Result<usize, SandboxError> {
    let entries = match fs::read_dir(state_dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(e) => return Err(SandboxError::io("read", state_dir, e)),
    };
    let mut reaped = 0;
    for entry in entries {
        let path = entry.map_err(|e| SandboxError::io("read", state_dir, e))?.path();
        if !fs::read_to_string(path.join("owner")).is_ok_and(|o| o == owner) {
            continue;
        }
        let Ok(lock) = File::open(path.join("lock")) else {
            continue;
        };
        if try_lock(&lock) {
            reaped += reap_instance(&path)?;
        }
    }
    Ok(reaped)
}

fn reap_instance(path: &Path) -> Result<usize, SandboxError> {
    let sandboxes = sandboxes_in(path).map_err(|e| SandboxError::io("read", path, e))?;
    for sandbox in &sandboxes {
        end_leftover(sandbox);
        tracing::info!(sandbox = %sandbox.display(), "removed what a dead run left");
    }
    remove_tree(path)?;
    Ok(sandboxes.len())
}

/// Folders of sandboxes that have not ended.
fn sandboxes_in(instance: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(instance)? {
        let entry = entry?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if !hidden && entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Kills the recorded process, if it is still the same one, and removes the control groups.
fn end_leftover(sandbox: &Path) {
    let record = fs::read_to_string(sandbox.join(RECORD)).unwrap_or_default();
    let values = |key: &'static str| {
        record
            .lines()
            .filter_map(move |l| l.strip_prefix(key)?.strip_prefix('='))
    };
    for (pid, start) in values("pid").filter_map(|v| v.split_once(' ')) {
        let Ok(pid) = pid.parse::<i32>() else { continue };
        let deadline = Instant::now() + Duration::from_secs(5);
        while start_time(pid).as_deref() == Some(start) && Instant::now() < deadline {
            // SAFETY: kill with integer arguments; the start time says that it is our process.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    for group in values("cgroup") {
        limits::remove_group(Path::new(group));
    }
}

/// Start time of a living process in clock ticks since boot; with the id it names one process for good.
pub fn start_time(pid: i32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    let state = fields.next()?;
    (state != "Z").then_some(())?;
    fields.nth(18).map(str::to_string)
}

fn try_lock(file: &File) -> bool {
    // SAFETY: flock on an open descriptor.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
}

fn random() -> Result<u32, SandboxError> {
    getrandom::u32().map_err(|e| SandboxError::io("read", "/dev/urandom", io::Error::other(e.to_string())))
}

fn check_name(name: &str, sandbox: &str) -> Result<(), SandboxError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if !name.is_empty() && name.len() <= 200 && !name.starts_with('.') && name.chars().all(fits) {
        return Ok(());
    }
    Err(SandboxError::Spec {
        name: sandbox.into(),
        problem: format!("`{name}` is not a name: 1 to 200 letters, digits, `.`, `_`, `-`, no leading `.`"),
    })
}

fn make_dirs(path: &Path) -> Result<(), SandboxError> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o755);
    builder
        .create(path)
        .map_err(|e| SandboxError::io("create the folder", path, e))
}

/// Removes a tree, folders without permissions included.
fn remove_tree(path: &Path) -> Result<(), SandboxError> {
    match remove_attempt(path) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            open_folders(path);
            remove_attempt(path).map_err(|e| SandboxError::io("remove", path, e))
        }
        other => other.map_err(|e| SandboxError::io("remove", path, e)),
    }
}

fn remove_attempt(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Lets the owner into every folder. Links are not followed.
fn open_folders(path: &Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).ok();
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            open_folders(&entry.path());
        }
    }
}

/// Opens a file for appending what bubblewrap says.
pub fn open_log(folder: &Folder) -> Result<(File, PathBuf), SandboxError> {
    let path = folder.path().join("bwrap.log");
    let file = OpenOptions::new().create(true).append(true).open(&path);
    file.map(|f| (f, path.clone()))
        .map_err(|e| SandboxError::io("create", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dead_folders_of_the_same_owner_are_reaped() {
        let state = tempfile::tempdir().unwrap();
        let living = Instance::create(state.path(), "head").unwrap();
        let other = Instance::create(state.path(), "sidecar").unwrap();
        let folder = living.sandbox(&SandboxSpec::new("a")).unwrap();
        // What a killed process leaves: the folder without a lock holder.
        for owner in ["head", "sidecar"] {
            let dead = state.path().join(format!("{owner}-1-dead"));
            fs::create_dir_all(dead.join("one/root/closed")).unwrap();
            fs::create_dir_all(dead.join("two")).unwrap();
            fs::set_permissions(dead.join("one/root/closed"), fs::Permissions::from_mode(0o0)).unwrap();
            fs::write(dead.join("owner"), owner).unwrap();
            fs::write(dead.join("lock"), "").unwrap();
        }
        assert_eq!(reap(state.path(), "head").unwrap(), 2);
        assert!(!state.path().join("head-1-dead").exists());
        assert!(state.path().join("sidecar-1-dead/two").exists());
        assert!(folder.path().exists() && other.path().exists());
        assert_eq!(reap(Path::new("/no/such/folder"), "head").unwrap(), 0);
    }

    #[test]
    fn a_recorded_process_is_killed_only_if_it_is_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        fs::write(dir.path().join(RECORD), format!("pid={pid} 1\n")).unwrap();
        end_leftover(dir.path());
        assert!(
            child.try_wait().unwrap().is_none(),
            "a process that reused the id was killed"
        );
        fs::write(
            dir.path().join(RECORD),
            format!(
                "trial=t
pid={pid} {}
",
                start_time(pid).unwrap()
            ),
        )
        .unwrap();
        end_leftover(dir.path());
        assert!(child.wait().unwrap().code().is_none());
    }

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        let state = tempfile::tempdir().unwrap();
        let instance = Instance::create(state.path(), "head").unwrap();
        for name in ["", "../x", "a/b", ".x", "a b"] {
            assert!(instance.sandbox(&SandboxSpec::new(name)).is_err(), "{name}");
        }
        let _first = instance.sandbox(&SandboxSpec::new("twin")).unwrap();
        assert!(instance.sandbox(&SandboxSpec::new("twin")).is_err());
    }
}
