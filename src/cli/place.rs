//! Which rank this process is, from the environment of its launcher, before MPI starts.

/// A place in the world of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Rank, from 0.
    pub rank: u32,
    /// Number of ranks, where the launcher says it.
    pub size: Option<u32>,
}

/// Variables of launchers: rank, size. The first that is set decides: `mpirun` inside an allocation
/// sees `SLURM_PROCID` of the batch step as well.
const LAUNCHERS: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
];

impl Place {
    /// The place of this process.
    pub fn of_process() -> Self {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// The place that the given environment states; rank 0 of a world of one without a launcher.
    pub fn from_variables(get: impl Fn(&str) -> Option<String>) -> Self {
        let number = |name: &str| get(name).and_then(|text| text.trim().parse::<u32>().ok());
        for (rank, size) in LAUNCHERS {
            if let Some(rank) = number(rank) {
                return Self {
                    rank,
                    size: number(size),
                };
            }
        }
        Self {
            rank: 0,
            size: Some(1),
        }
    }

    /// True for the rank that prints.
    pub fn is_head(self) -> bool {
        self.rank == 0
    }
}

#[cfg(test)]
mod tests {
    use super::Place;

    fn place(variables: &[(&str, &str)]) -> Place {
        Place::from_variables(|name| {
            variables
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| (*v).to_owned())
        })
    }

    #[test]
    fn the_launcher_nearest_to_the_process_decides() {
        assert_eq!(
            place(&[]),
            Place {
                rank: 0,
                size: Some(1)
            }
        );
        let mpirun_in_a_job = [
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "1"),
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
        ];
        assert_eq!(
            place(&mpirun_in_a_job),
            Place {
                rank: 3,
                size: Some(4)
            }
        );
        let srun = [
            ("PMIX_RANK", "1"),
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "2"),
        ];
        assert_eq!(
            place(&srun),
            Place {
                rank: 1,
                size: Some(2)
            }
        );
        assert!(!place(&srun).is_head());
    }
}
