//! One process tree per folder that a run writes. Two jobs that train the same experiment would spoil its
//! buffer; two that share a checkpoint folder would publish each other's steps; two that share a log file
//! would mix their metrics.

use crate::{config::settings::Settings, preflight::facts::folders};
use std::{
    fs::{File, OpenOptions},
    io::{Read, Seek, Write},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

/// One locked folder, held for the life of the head; the kernel drops it when the process dies, however it
/// dies.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

/// The locks of a run: its own folder, its checkpoints, and its log file.
#[derive(Debug)]
pub struct RunLocks {
    _locks: Vec<RunLock>,
}

impl RunLocks {
    /// Locks everything that `settings` lets the run write.
    pub fn acquire(settings: &Settings) -> Result<Self, RunLockError> {
        let locks = folders::locks(settings);
        let locks = locks.iter().map(|(_, file)| RunLock::of_file(file));
        Ok(Self {
            _locks: locks.collect::<Result<_, _>>()?,
        })
    }
}

/// The run folder cannot be locked.
#[derive(Debug, thiserror::Error)]
pub enum RunLockError {
    /// Somebody holds it.
    #[error("{path} is in use by {holder}; wait for it, or give this run another EXP_NAME or folder", path = path.display())]
    InUse {
        /// The lock file.
        path: PathBuf,
        /// Host, process and job of the holder, as it wrote them.
        holder: String,
    },
    /// The file system refuses.
    #[error("cannot lock {path}", path = path.display())]
    Io {
        /// The lock file.
        path: PathBuf,
        /// Its error.
        #[source]
        source: std::io::Error,
    },
}

impl RunLock {
    /// Locks `path`, which is created, and writes who holds it.
    pub fn of_file(path: &Path) -> Result<Self, RunLockError> {
        let path = path.to_owned();
        let io = |source| RunLockError::Io {
            path: path.clone(),
            source,
        };
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).map_err(io)?;
        }
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(io)?;
        // SAFETY: flock takes an open descriptor, which `file` owns for the whole call.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            let error = std::io::Error::last_os_error();
            if error.kind() != std::io::ErrorKind::WouldBlock {
                return Err(io(error));
            }
            let mut holder = String::new();
            file.read_to_string(&mut holder).map_err(io)?;
            return Err(RunLockError::InUse {
                path,
                holder: holder.trim().to_owned(),
            });
        }
        file.set_len(0).and_then(|()| file.rewind()).map_err(io)?;
        let job =
            std::env::var("SLURM_JOB_ID").map_or_else(|_| String::new(), |id| format!(", Slurm job {id}"));
        writeln!(file, "host {}, process {}{job}", host_name(), std::process::id()).map_err(io)?;
        Ok(Self { _file: file })
    }
}

/// Name of this machine.
pub fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown".into(), |t| t.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_holder_is_named_and_refused_until_the_first_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let first = RunLock::of_file(&dir.path().join("run.lock")).unwrap();
        let error = RunLock::of_file(&dir.path().join("run.lock"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(&format!("process {}", std::process::id())),
            "{error}"
        );
        drop(first);
        RunLock::of_file(&dir.path().join("run.lock")).unwrap();
    }
}
