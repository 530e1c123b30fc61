//! One folder for the messages of one attempt.
//!
//! Under Slurm its name is `attempt-<job id>-<restart count>`, the same on every node without a word
//! between them. Elsewhere attempts are counted: `attempt-001`, `attempt-002`, …

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// A start of the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// Folder for its files; it exists.
    pub folder: PathBuf,
    /// Job and restart count under Slurm.
    pub slurm: Option<(String, u32)>,
}

impl Attempt {
    /// Makes the folder of a new attempt below `logs/exp`. Only rank 0 counts; other ranks get the
    /// folder from it.
    pub fn start(logs: &Path, exp: &str) -> io::Result<Self> {
        Self::start_with(logs, exp, |name| std::env::var(name).ok())
    }

    fn start_with(logs: &Path, exp: &str, get: impl Fn(&str) -> Option<String>) -> io::Result<Self> {
        let parent = logs.join(exp);
        fs::create_dir_all(&parent)?;
        if let Some(job) = get("SLURM_JOB_ID").filter(|id| !id.is_empty()) {
            let restarts = get("SLURM_RESTART_COUNT")
                .and_then(|n| n.parse().ok())
                .unwrap_or(0);
            let folder = parent.join(format!("attempt-{job}-{restarts}"));
            fs::create_dir_all(&folder)?;
            return Ok(Self {
                folder,
                slurm: Some((job, restarts)),
            });
        }
        let taken = fs::read_dir(&parent)?
            .filter_map(|entry| {
                entry
                    .ok()?
                    .file_name()
                    .to_str()?
                    .strip_prefix("attempt-")?
                    .parse::<u32>()
                    .ok()
            })
            .max()
            .unwrap_or(0);
        // Two programs that start at once must not share a folder: create_dir decides.
        for number in taken + 1.. {
            let folder = parent.join(format!("attempt-{number:03}"));
            match fs::create_dir(&folder) {
                Ok(()) => return Ok(Self { folder, slurm: None }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other("attempts cannot be counted any further"))
    }
}

#[cfg(test)]
mod tests {
    use super::Attempt;

    #[test]
    fn attempts_are_counted_or_named_after_the_job() {
        let logs = tempfile::tempdir().unwrap();
        let name = |get: &dyn Fn(&str) -> Option<String>| {
            let attempt = Attempt::start_with(logs.path(), "e", get).unwrap();
            assert!(attempt.folder.is_dir());
            attempt.folder.file_name().unwrap().to_string_lossy().into_owned()
        };
        assert_eq!(name(&|_| None), "attempt-001");
        assert_eq!(name(&|_| None), "attempt-002");
        let slurm = |name: &str| match name {
            "SLURM_JOB_ID" => Some("77".to_owned()),
            "SLURM_RESTART_COUNT" => Some("2".to_owned()),
            _ => None,
        };
        assert_eq!(name(&slurm), "attempt-77-2");
        assert_eq!(
            name(&slurm),
            "attempt-77-2",
            "every rank of the job finds the same folder"
        );
        assert_eq!(name(&|_| None), "attempt-003");
    }
}
