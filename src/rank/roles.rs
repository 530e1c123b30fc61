//! Which rank does what.
//!
//! | World | Mode | Rank 0 | Other ranks |
//! |---|---|---|---|
//! | 1 | any | head, trainer, engine replica | - |
//! | n | sync | head, trainer, engine replica | engine replica |
//! | n | async | head, trainer | engine replica |
//!
//! The head holds the control plane (proxy, balancer, session scheduler, buffer, journal) and, in this
//! version, the whole trainer and the workers that drive sandboxes.

use crate::config::settings::values::TrainingMode;

/// What the whole world looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoleMap {
    /// Number of ranks.
    pub size: u32,
    /// Rank 0 serves a replica of its own.
    pub head_has_engine: bool,
    /// Ranks that serve nothing but a replica.
    pub engine_ranks: Vec<u32>,
}

impl RoleMap {
    /// Roles of a world of `size` ranks.
    pub fn new(mode: TrainingMode, size: u32) -> Self {
        Self {
            size,
            head_has_engine: size == 1 || mode == TrainingMode::Sync,
            engine_ranks: (1..size).collect(),
        }
    }

    /// Number of engine replicas.
    pub fn replicas(&self) -> usize {
        self.engine_ranks.len() + usize::from(self.head_has_engine)
    }

    /// One line per rank, for the log.
    pub fn describe(&self) -> Vec<String> {
        let head = if self.head_has_engine {
            "head, trainer, engine replica"
        } else {
            "head, trainer"
        };
        std::iter::once(format!("rank 0: {head}"))
            .chain(
                self.engine_ranks
                    .iter()
                    .map(|r| format!("rank {r}: engine replica")),
            )
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_world_has_a_replica_and_sync_uses_every_rank() {
        assert_eq!(RoleMap::new(TrainingMode::Async, 1).replicas(), 1);
        assert_eq!(RoleMap::new(TrainingMode::Sync, 3).replicas(), 3);
        let two = RoleMap::new(TrainingMode::Async, 2);
        assert_eq!((two.replicas(), two.head_has_engine), (1, false));
        assert_eq!(
            two.describe(),
            ["rank 0: head, trainer", "rank 1: engine replica"]
        );
    }
}
