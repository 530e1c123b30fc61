//! Which replica serves a session: a synchronous decision core without sockets or clocks.
//!
//! | Policy | A session's first turn | Later turns | Made for |
//! |---|---|---|---|
//! | [`BalancePolicy::StickyLeastLoaded`] | the replica with the fewest sessions, then fewest running turns | same replica while it is up | agents: history grows by appending, so the replica that served the last turn holds the prefix |
//! | [`BalancePolicy::PrefixAware`] | the replica that has seen the longest beginning of the prompt, unless it has [`LOAD_SLACK`] more sessions than the emptiest one | same replica while it is up | many sessions with few distinct system prompts |
//! | [`BalancePolicy::RoundRobin`] | next replica in order | next replica in order | a baseline to measure against |
//!
//! Invariants ([`Balancer::sanity_check`]): a session has at most one home, and a home is a replica that
//! is up; a replica's session count is the number of homes on it; a draining or lost replica is never
//! picked. One replica is the case N = 1 of this and nothing else.

#[cfg(test)]
mod tests;

use crate::base::{ReplicaId, SessionId};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::{DefaultHasher, Hash, Hasher},
    str::FromStr,
};

/// How replicas are chosen; see the module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum BalancePolicy {
    /// Sticky by session, least loaded first.
    #[default]
    StickyLeastLoaded,
    /// Sticky by session, longest known prompt prefix first.
    PrefixAware,
    /// In turn, whatever the session.
    RoundRobin,
}

impl FromStr for BalancePolicy {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "sticky_least_loaded" => Ok(Self::StickyLeastLoaded),
            "prefix_aware" => Ok(Self::PrefixAware),
            "round_robin" => Ok(Self::RoundRobin),
            other => Err(format!(
                "`{other}` is not a balancing policy; known: sticky_least_loaded, prefix_aware, round_robin"
            )),
        }
    }
}

/// Sessions that a replica may have more than the emptiest one and still attract by its prefix.
pub const LOAD_SLACK: u32 = 4;
/// Prompt tokens that are remembered as one block.
const BLOCK_TOKENS: usize = 256;
/// Blocks of a prompt that are remembered: beginnings that sessions share are system prompts and tools.
const MAX_BLOCKS: usize = 128;
/// Remembered blocks over all replicas; the map starts anew when it is full.
const MAX_REMEMBERED: usize = 1 << 18;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Up,
    Draining,
}

#[derive(Debug)]
struct Replica {
    health: Health,
    in_flight: u32,
    sessions: u32,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub struct Balancer {
    policy: BalancePolicy,
    replicas: BTreeMap<ReplicaId, Replica>,
    /// Replicas that are up by sessions, running turns and id: the first one is the least loaded.
    by_load: BTreeSet<(u32, u32, ReplicaId)>,
    homes: HashMap<SessionId, ReplicaId>,
    last: Option<ReplicaId>,
    /// Which replicas have seen a beginning of a prompt, by chained block hash.
    seen: HashMap<u64, Vec<ReplicaId>>,
}

impl Balancer {
    /// A balancer without replicas.
    pub fn new(policy: BalancePolicy) -> Self {
        Self {
            policy,
            ..Self::default()
        }
    }

    /// Changes a replica's load and keeps the order by load. `None` for a replica that is not known.
    fn change(&mut self, id: ReplicaId, change: impl FnOnce(&mut Replica)) -> Option<()> {
        let replica = self.replicas.get_mut(&id)?;
        self.by_load.remove(&(replica.sessions, replica.in_flight, id));
        change(replica);
        if replica.health == Health::Up {
            self.by_load.insert((replica.sessions, replica.in_flight, id));
        }
        Some(())
    }

    /// A replica is ready. One that was draining is up again.
    pub fn on_join(&mut self, id: ReplicaId) {
        self.replicas.entry(id).or_insert(Replica {
            health: Health::Up,
            in_flight: 0,
            sessions: 0,
        });
        self.change(id, |replica| replica.health = Health::Up);
    }

    /// A replica takes no further turns; running ones end there, and its sessions move on their next.
    pub fn on_drain(&mut self, id: ReplicaId) {
        let drains = self.change(id, |replica| {
            replica.health = Health::Draining;
            replica.sessions = 0;
        });
        if drains.is_some() {
            self.homes.retain(|_, home| *home != id);
        }
    }

    /// A replica is gone. Its sessions move on their next turn; running turns must be picked again.
    pub fn on_loss(&mut self, id: ReplicaId) {
        if let Some(replica) = self.replicas.remove(&id) {
            self.by_load.remove(&(replica.sessions, replica.in_flight, id));
        }
        self.homes.retain(|_, home| *home != id);
        for replicas in self.seen.values_mut() {
            replicas.retain(|r| *r != id);
        }
        self.seen.retain(|_, replicas| !replicas.is_empty());
    }

    /// The replica for a turn of `session`, which counts as running until [`Balancer::on_turn_end`].
    /// `None` while no replica is up.
    pub fn pick(&mut self, session: &SessionId, prompt: &[u32]) -> Option<ReplicaId> {
        let id = match self.policy {
            BalancePolicy::RoundRobin => self.next_in_turn()?,
            _ => match self.homes.get(session) {
                Some(home) => *home,
                None => {
                    let id = match self.policy {
                        BalancePolicy::PrefixAware => self.longest_prefix(prompt)?,
                        _ => self.least_loaded()?,
                    };
                    self.homes.insert(session.clone(), id);
                    self.change(id, |replica| replica.sessions += 1)?;
                    id
                }
            },
        };
        self.change(id, |replica| replica.in_flight += 1)?;
        self.last = Some(id);
        Some(id)
    }

    /// A turn that was picked for `replica` has ended, however it ended.
    pub fn on_turn_end(&mut self, replica: ReplicaId) {
        self.change(replica, |replica| {
            replica.in_flight = replica.in_flight.saturating_sub(1)
        });
    }

    /// The session will ask no more.
    pub fn on_session_end(&mut self, session: &SessionId) {
        if let Some(home) = self.homes.remove(session) {
            self.change(home, |replica| {
                replica.sessions = replica.sessions.saturating_sub(1)
            });
        }
    }

    /// Replicas that are up.
    pub fn up(&self) -> impl Iterator<Item = ReplicaId> + '_ {
        self.replicas
            .iter()
            .filter(|(_, r)| r.health == Health::Up)
            .map(|(id, _)| *id)
    }

    /// Turns that run on a replica.
    pub fn in_flight(&self, replica: ReplicaId) -> u32 {
        self.replicas.get(&replica).map_or(0, |r| r.in_flight)
    }

    fn next_in_turn(&self) -> Option<ReplicaId> {
        let after = self.up().find(|id| Some(*id) > self.last);
        after.or_else(|| self.up().next())
    }

    fn least_loaded(&self) -> Option<ReplicaId> {
        self.by_load.first().map(|(_, _, id)| *id)
    }

    fn longest_prefix(&mut self, prompt: &[u32]) -> Option<ReplicaId> {
        let emptiest = self.least_loaded()?;
        let limit = self.replicas.get(&emptiest)?.sessions + LOAD_SLACK;
        let mut hasher = DefaultHasher::new();
        let hashes: Vec<u64> = prompt
            .chunks_exact(BLOCK_TOKENS)
            .take(MAX_BLOCKS)
            .map(|block| {
                block.hash(&mut hasher);
                hasher.finish()
            })
            .collect();
        let fits = |id: &ReplicaId| {
            self.replicas
                .get(id)
                .is_some_and(|r| r.health == Health::Up && r.sessions < limit)
        };
        let known = hashes.iter().rev().find_map(|hash| {
            let replicas = self.seen.get(hash)?.iter().filter(|id| fits(id));
            replicas
                .min_by_key(|id| self.replicas.get(id).map_or(0, |r| r.sessions))
                .copied()
        });
        let chosen = known.unwrap_or(emptiest);
        if self.seen.len() + hashes.len() > MAX_REMEMBERED {
            self.seen.clear();
        }
        for hash in hashes {
            let replicas = self.seen.entry(hash).or_default();
            if !replicas.contains(&chosen) {
                replicas.push(chosen);
            }
        }
        Some(chosen)
    }

    /// Panics if an invariant of the module documentation does not hold.
    pub fn sanity_check(&self) {
        for (session, home) in &self.homes {
            let replica = self.replicas.get(home);
            assert!(
                replica.is_some_and(|r| r.health == Health::Up),
                "session {session} has its home on replica {home}, which is not up"
            );
        }
        for (id, replica) in &self.replicas {
            let homes = self.homes.values().filter(|home| *home == id).count();
            assert_eq!(replica.sessions as usize, homes, "sessions of replica {id}");
            let listed = self.by_load.contains(&(replica.sessions, replica.in_flight, *id));
            assert_eq!(
                listed,
                replica.health == Health::Up,
                "replica {id} in the order by load"
            );
        }
        assert_eq!(
            self.by_load.len(),
            self.up().count(),
            "replicas in the order by load"
        );
        for id in self.seen.values().flatten() {
            assert!(
                self.replicas.contains_key(id),
                "a prefix is remembered for lost replica {id}"
            );
        }
    }
}
