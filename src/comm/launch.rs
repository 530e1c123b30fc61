//! Joining the world that this process was started in.

use super::{single, CommError, Communicator};
use std::sync::Arc;

/// How this process was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaunchKind {
    /// Without a launcher: the only rank.
    Single,
    /// By `mpirun` or `srun --mpi=pmix`.
    Mpi,
}

/// The ranks of a run and how they were started.
pub struct World {
    /// This rank's access to all ranks.
    pub comm: Arc<dyn Communicator>,
    /// How it was started.
    pub kind: LaunchKind,
    #[cfg(feature = "mpi")]
    mpi: Option<super::mpi::MpiWorld>,
}

impl World {
    /// Leaves the world in good order: waits until everything sent is taken, then leaves MPI, which may
    /// wait for the other ranks to do the same. Call it as the last thing; sends fail from here on.
    pub fn shutdown(self) -> Result<(), CommError> {
        #[cfg(feature = "mpi")]
        if let Some(mpi) = self.mpi {
            return mpi.shutdown();
        }
        Ok(())
    }

    /// Ends all ranks of the world at once with exit code `code`.
    pub fn abort(&self, code: i32) -> ! {
        #[cfg(feature = "mpi")]
        if let Some(mpi) = &self.mpi {
            mpi.abort(code);
        }
        std::process::exit(code)
    }
}

/// Joins the ranks that the launcher started, or makes a world of one without a launcher. MPI is started
/// only under a launcher, on a thread of its own. Call it once.
///
/// # Errors
/// [`CommError::Launch`] when a launcher started several processes that cannot find each other.
pub fn launch_world() -> Result<World, CommError> {
    match decide(|name| std::env::var(name).ok())? {
        LaunchKind::Single => Ok(World {
            comm: single(),
            kind: LaunchKind::Single,
            #[cfg(feature = "mpi")]
            mpi: None,
        }),
        #[cfg(feature = "mpi")]
        LaunchKind::Mpi => {
            let (comm, mpi) = super::mpi::start()?;
            Ok(World {
                comm,
                kind: LaunchKind::Mpi,
                mpi: Some(mpi),
            })
        }
        #[cfg(not(feature = "mpi"))]
        LaunchKind::Mpi => Err(CommError::Launch(
            "a launcher started this process, and this program was built without MPI".to_owned(),
        )),
    }
}

/// Number of this rank among those of its node, from 0, as the launcher says; 0 without a launcher.
pub fn local_rank() -> u32 {
    local_rank_of(|name| std::env::var(name).ok())
}

fn local_rank_of(variable: impl Fn(&str) -> Option<String>) -> u32 {
    // Under `mpirun` inside a Slurm step, Slurm's number is that of the one task that mpirun is.
    ["OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"]
        .iter()
        .find_map(|name| variable(name)?.parse().ok())
        .unwrap_or(0)
}

/// What the launcher left in the environment.
fn decide(variable: impl Fn(&str) -> Option<String>) -> Result<LaunchKind, CommError> {
    let is_set = |name: &str| variable(name).is_some();
    if is_set("OMPI_COMM_WORLD_SIZE") || is_set("PMIX_RANK") {
        return Ok(LaunchKind::Mpi);
    }
    // Set in job steps alone, so a batch script or a login shell is not mistaken for one.
    let tasks = variable("SLURM_STEP_NUM_TASKS")
        .and_then(|tasks| tasks.parse::<u32>().ok())
        .filter(|_| is_set("SLURM_PROCID"));
    match tasks {
        Some(tasks) if tasks > 1 => Err(CommError::Launch(format!(
            "srun started {tasks} tasks without PMIx, so each would be a run of its own: \
             add `--mpi=pmix` to srun (`srun --mpi=list` shows what this cluster has)"
        ))),
        _ => Ok(LaunchKind::Single),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(variables: &[(&str, &str)]) -> Result<LaunchKind, CommError> {
        decide(|name| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_number_on_the_node_is_the_launchers() {
        let number = |variables: &[(&str, &str)]| {
            local_rank_of(|name| {
                let found = variables.iter().find(|(n, _)| *n == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(number(&[]), 0);
        assert_eq!(number(&[("SLURM_LOCALID", "3")]), 3);
        let both = [("SLURM_LOCALID", "0"), ("OMPI_COMM_WORLD_LOCAL_RANK", "2")];
        assert_eq!(number(&both), 2);
    }

    #[test]
    fn launchers_are_told_apart() {
        assert_eq!(with(&[]).expect("alone"), LaunchKind::Single);
        assert_eq!(
            with(&[("OMPI_COMM_WORLD_SIZE", "2")]).expect("mpirun"),
            LaunchKind::Mpi
        );
        let srun = [
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("PMIX_RANK", "1"),
        ];
        assert_eq!(with(&srun).expect("srun with PMIx"), LaunchKind::Mpi);
        let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")];
        assert_eq!(with(&batch).expect("a batch script"), LaunchKind::Single);
        let error = with(&srun[..2]).expect_err("four lonely tasks").to_string();
        assert!(
            error.contains("4 tasks") && error.contains("--mpi=pmix"),
            "{error}"
        );
    }
}
