//! Which rank does what.
//!
//! | World | Mode | Rank 0 | Other ranks |
//! |---|---|---|---|
//! | 1 | any | head, trainer, engine replica | - |
//! | n | sync | head, trainer, engine replica | trainer, engine replica |
//! | n | async | head, trainer | the first ones trainer, the others engine replica |
//!
//! The head holds the control plane (proxy, balancer, session scheduler, buffer, journal), leads the
//! trainer ranks ([`super::team`]) and, in this version, runs the workers that drive sandboxes.

use crate::config::settings::values::TrainingMode;

/// What the whole world looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoleMap {
    /// Number of ranks.
    pub size: u32,
    /// Rank 0 serves a replica of its own.
    pub head_has_engine: bool,
    /// Ranks that train; rank 0 is the first.
    pub trainer_ranks: Vec<u32>,
    /// Ranks besides the first that serve a replica.
    pub engine_ranks: Vec<u32>,
}

impl RoleMap {
    /// Roles of a world of `size` ranks; under `async` the first `trainers` train.
    pub fn new(mode: TrainingMode, size: u32, trainers: u32) -> Self {
        let is_one_pool = size == 1 || mode == TrainingMode::Sync;
        let trainers = if is_one_pool {
            size
        } else {
            trainers.clamp(1, size)
        };
        let first_engine = if is_one_pool { 1 } else { trainers };
        Self {
            size,
            head_has_engine: is_one_pool,
            trainer_ranks: (0..trainers).collect(),
            engine_ranks: (first_engine..size).collect(),
        }
    }

    /// Number of engine replicas.
    pub fn replicas(&self) -> usize {
        self.engine_ranks.len() + usize::from(self.head_has_engine)
    }

    /// One line per rank, for the log.
    pub fn describe(&self) -> Vec<String> {
        let role = |rank: u32| {
            let has_engine = self.engine_ranks.contains(&rank) || rank == 0 && self.head_has_engine;
            let all = [
                (rank == 0, "head"),
                (self.trainer_ranks.contains(&rank), "trainer"),
                (has_engine, "engine replica"),
            ];
            let names: Vec<&str> = all
                .iter()
                .filter(|(has, _)| *has)
                .map(|(_, name)| *name)
                .collect();
            format!("rank {rank}: {}", names.join(", "))
        };
        (0..self.size).map(role).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_world_has_a_replica_and_sync_uses_every_rank() {
        assert_eq!(RoleMap::new(TrainingMode::Async, 1, 1).replicas(), 1);
        let sync = RoleMap::new(TrainingMode::Sync, 3, 3);
        assert_eq!((sync.replicas(), sync.trainer_ranks.len()), (3, 3));
        assert_eq!(sync.describe()[2], "rank 2: trainer, engine replica");
        let two = RoleMap::new(TrainingMode::Async, 2, 1);
        assert_eq!((two.replicas(), two.head_has_engine), (1, false));
        assert_eq!(
            two.describe(),
            ["rank 0: head, trainer", "rank 1: engine replica"]
        );
        let three = RoleMap::new(TrainingMode::Async, 3, 2);
        assert_eq!(
            three.describe(),
            [
                "rank 0: head, trainer",
                "rank 1: trainer",
                "rank 2: engine replica"
            ]
        );
    }
}
