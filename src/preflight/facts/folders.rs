//! Folders that the run writes to, and runs that hold them.

use crate::{base::files, config::Settings};
use std::{
    io::Read,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

/// Facts about a folder that the run writes to.
#[derive(Clone, Debug)]
pub struct FolderFacts {
    /// Variable that names it.
    pub variable: &'static str,
    /// The folder.
    pub path: PathBuf,
    /// What the variable names, links and `..` resolved as far as it exists: of `CKPTS_DIR` the folder that the
    /// run's own is made in.
    pub named: PathBuf,
    /// It, or the nearest existing parent, can be written to.
    pub writable: Result<(), String>,
    /// Bytes that this user may still write there.
    pub free_bytes: Option<u64>,
}

/// A folder of this run that a live run holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldFolder {
    /// Variable that names it.
    pub variable: &'static str,
    /// The lock.
    pub path: PathBuf,
    /// Host, process and job, as the holder wrote them.
    pub holder: String,
}

/// Looks at every folder of the run.
pub fn probe(s: &Settings) -> Vec<FolderFacts> {
    [
        ("RUN_DIR", &s.paths.run),
        ("CKPTS_DIR", &s.paths.checkpoints),
        ("LOG_DIR", &s.paths.logs),
        ("HARBOR_TRIALS_DIR", &s.paths.trials),
    ]
    .into_iter()
    .map(|(variable, path)| {
        let named = match variable {
            // Settings hold `<CKPTS_DIR>/<PROJECT_NAME>/<EXP_NAME>`.
            "CKPTS_DIR" => path.ancestors().nth(2).unwrap_or(path),
            _ => path,
        };
        folder(variable, path, named)
    })
    .collect()
}

/// Files that a run holds locked while it lives: variable that names the folder, lock. Two runs that
/// share one of these would overwrite each other's buffer, checkpoints or metrics.
pub fn locks(s: &Settings) -> [(&'static str, PathBuf); 3] {
    [
        ("RUN_DIR", s.paths.run.join("run.lock")),
        ("CKPTS_DIR", s.paths.checkpoints.join("run.lock")),
        ("LOG_DIR", s.paths.logs.join(format!(".{}.lock", s.run.exp_name))),
    ]
}

/// Locks of the run's folders that somebody holds.
pub fn held(s: &Settings) -> Vec<HeldFolder> {
    locks(s)
        .into_iter()
        .filter_map(|(variable, path)| {
            holder(&path).map(|holder| HeldFolder {
                variable,
                path,
                holder,
            })
        })
        .collect()
}

/// What the holder of a lock wrote into it; `None` when nobody holds it.
pub fn holder(lock: &Path) -> Option<String> {
    let mut file = files::open(lock).ok()?;
    // A shared lock for the blink of an eye: the kernel refuses it while a run holds its own.
    // SAFETY: flock takes an open descriptor, which `file` owns for the whole call.
    let refused = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_SH | libc::LOCK_NB) } != 0;
    if !refused || std::io::Error::last_os_error().kind() != std::io::ErrorKind::WouldBlock {
        return None;
    }
    let mut text = String::new();
    match file.read_to_string(&mut text) {
        Ok(_) if !text.trim().is_empty() => Some(text.trim().to_owned()),
        _ => Some("a process that has not said who it is".to_owned()),
    }
}

fn existing(path: &Path) -> &Path {
    path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"))
}

fn resolved(path: &Path) -> PathBuf {
    let there = existing(path);
    let rest = path.strip_prefix(there).unwrap_or(Path::new(""));
    match there.canonicalize() {
        // Without a remainder nothing is joined: it would end in a slash.
        Ok(real) if rest.as_os_str().is_empty() => real,
        Ok(real) => real.join(rest),
        Err(_) => path.to_path_buf(),
    }
}

fn folder(variable: &'static str, path: &Path, named: &Path) -> FolderFacts {
    let existing = existing(path);
    let writable = if !existing.is_dir() {
        Err(format!("{} is not a folder", existing.display()))
    } else {
        access_write(existing)
            .map_err(|error| format!("{} cannot be written to: {error}", existing.display()))
    };
    FolderFacts {
        variable,
        path: path.to_path_buf(),
        named: resolved(named),
        writable,
        free_bytes: space(existing).map(|space| space.free),
    }
}

/// Size of a file system and what this user may still write, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Whole size.
    pub total: u64,
    /// What this user may still write.
    pub free: u64,
}

/// Space of the file system that holds `path`.
pub fn space(path: &Path) -> Option<Space> {
    let path = path_bytes(path).ok()?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` is a NUL-terminated string and `stat` is large enough for one statvfs.
    let failed = unsafe { libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) } != 0;
    if failed {
        return None;
    }
    // SAFETY: statvfs succeeded, so it has filled the structure.
    let stat = unsafe { stat.assume_init() };
    Some(Space {
        total: stat.f_blocks * stat.f_frsize,
        free: stat.f_bavail * stat.f_frsize,
    })
}

fn path_bytes(path: &Path) -> std::io::Result<std::ffi::CString> {
    use std::os::unix::ffi::OsStrExt;
    std::ffi::CString::new(path.as_os_str().as_bytes()).map_err(std::io::Error::other)
}

fn access_write(path: &Path) -> std::io::Result<()> {
    let path = path_bytes(path)?;
    // SAFETY: `path` is a NUL-terminated string that lives through the call; access only reads it.
    let refused = unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) } != 0;
    if refused {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_known_by_its_real_path() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("link")).unwrap();
        for (path, want) in [
            (dir.path().join("link"), PathBuf::from("/")),
            (PathBuf::from("/usr/../"), PathBuf::from("/")),
            (dir.path().join("new/one"), real.join("new/one")),
            (PathBuf::from("/usr"), PathBuf::from("/usr")),
        ] {
            assert_eq!(folder("RUN_DIR", &path, &path).named, want, "{}", path.display());
        }
    }

    #[test]
    fn a_held_lock_names_its_holder_and_a_free_one_nobody() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(holder(&dir.path().join("run.lock")), None, "no lock");
        let lock = crate::rank::run_lock::RunLock::of_file(&dir.path().join("run.lock")).unwrap();
        let said = holder(&dir.path().join("run.lock")).unwrap();
        assert!(
            said.contains(&format!("process {}", std::process::id())),
            "{said}"
        );
        drop(lock);
        assert_eq!(
            holder(&dir.path().join("run.lock")),
            None,
            "a file that nobody holds"
        );
    }
}
