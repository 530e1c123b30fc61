//! The order of tasks: which row of the task index a training group is.
//!
//! Both the buffer (which admits trials) and the reader of a run's history need the same answer from
//! the group number alone, over restarts and over versions of this program. So the generator is
//! written out here and never changes:
//!
//! - Epoch `e = group / n_rows`, place `p = group % n_rows`.
//! - The epoch's permutation is Fisher–Yates over `0..n_rows` from the last place down to the second,
//!   drawing `j` uniformly from `0..=i` with SplitMix64 (Steele, Lea, Flood 2014), seeded with
//!   `mix(seed, ORDER_DOMAIN, e)`; draws are made unbiased by rejecting the incomplete last interval.
//! - The row is the permutation's entry at `p`. Each epoch therefore visits every row once.

use super::{GroupId, Purpose, TrialKey};

/// Separates the streams that come from one run seed.
const ORDER_DOMAIN: u64 = 0x6f72_6465_725f_7631;
const TRIAL_DOMAIN: u64 = 0x7472_6961_6c5f_7631;

/// SplitMix64: state advances by the golden gamma, output is the finalised state.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        finalize(self.0)
    }

    /// Uniform in `0..bound`; `bound` is at least 1.
    fn below(&mut self, bound: u64) -> u64 {
        let zone = u64::MAX - (u64::MAX % bound + 1) % bound;
        loop {
            let draw = self.next();
            if draw <= zone {
                return draw % bound;
            }
        }
    }
}

fn finalize(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn mix(words: &[u64]) -> u64 {
    words.iter().fold(0x243f_6a88_85a3_08d3, |state, word| {
        finalize(state.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ *word)
    })
}

/// Rows of one epoch in the order in which groups visit them.
///
/// # Panics
/// When `n_rows` is 0: an index without rows has no order.
pub fn epoch_order(epoch: u64, n_rows: u32, seed: u64) -> Vec<u32> {
    assert!(n_rows > 0, "a task index without rows has no order");
    let mut rows: Vec<u32> = (0..n_rows).collect();
    let mut random = SplitMix64(mix(&[seed, ORDER_DOMAIN, epoch]));
    for i in (1..rows.len()).rev() {
        let j = random.below(i as u64 + 1) as usize;
        rows.swap(i, j);
    }
    rows
}

/// Row of the task index that training group `group` works on. Costs one pass over an epoch.
///
/// # Panics
/// When `n_rows` is 0.
pub fn row_of(group: GroupId, n_rows: u32, seed: u64) -> u32 {
    let epoch = group.0 / u64::from(n_rows.max(1));
    epoch_order(epoch, n_rows, seed)[(group.0 % u64::from(n_rows)) as usize]
}

/// Seed of a trial's sampling: the run seed mixed with the trial and its attempt, so that a retry
/// draws anew and a trial that runs again after a restart draws what it would have drawn.
pub fn trial_seed(seed: u64, key: &TrialKey, attempt: u32) -> u64 {
    let purpose = match key.purpose {
        Purpose::Train => 0,
        Purpose::Val { step } => 1 + u64::from(step),
    };
    mix(&[
        seed,
        TRIAL_DOMAIN,
        purpose,
        key.group.0,
        u64::from(key.sample),
        u64::from(attempt),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First outputs of the reference implementation for seed 1234567.
    #[test]
    fn splitmix_matches_the_reference() {
        let mut random = SplitMix64(1_234_567);
        let got: Vec<u64> = (0..3).map(|_| random.next()).collect();
        assert_eq!(
            got,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
    }

    #[test]
    fn every_epoch_visits_every_row_once_in_its_own_order() {
        let epochs: Vec<Vec<u32>> = (0..3).map(|e| epoch_order(e, 50, 7)).collect();
        for order in &epochs {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..50).collect::<Vec<u32>>());
        }
        assert_ne!(epochs[0], epochs[1]);
        assert_ne!(epochs[1], epochs[2]);
        assert_ne!(epochs[0], epoch_order(0, 50, 8));
    }

    #[test]
    fn row_of_agrees_with_the_epoch() {
        for group in 0..30u64 {
            let order = epoch_order(group / 7, 7, 3);
            assert_eq!(row_of(GroupId(group), 7, 3), order[(group % 7) as usize]);
        }
        assert_eq!(row_of(GroupId(12), 1, 3), 0);
    }

    /// Chi-square of the row at the first place over many epochs; the 99.9% quantile with 9 degrees of
    /// freedom is 27.9.
    #[test]
    fn first_place_is_uniform() {
        let mut counts = [0f64; 10];
        for epoch in 0..5000 {
            counts[epoch_order(epoch, 10, 11)[0] as usize] += 1.0;
        }
        let chi2: f64 = counts.iter().map(|c| (c - 500.0).powi(2) / 500.0).sum();
        assert!(chi2 < 27.9, "chi2 = {chi2}, counts = {counts:?}");
    }

    #[test]
    fn trial_seeds_differ_in_every_part() {
        let key = |group, sample| TrialKey {
            purpose: Purpose::Train,
            group: GroupId(group),
            sample,
        };
        let base = trial_seed(1, &key(2, 3), 0);
        let val = TrialKey {
            purpose: Purpose::Val { step: 0 },
            ..key(2, 3)
        };
        for other in [
            trial_seed(2, &key(2, 3), 0),
            trial_seed(1, &key(3, 3), 0),
            trial_seed(1, &key(2, 2), 0),
            trial_seed(1, &key(2, 3), 1),
            trial_seed(1, &val, 0),
        ] {
            assert_ne!(base, other);
        }
        assert_eq!(base, trial_seed(1, &key(2, 3), 0));
    }
}
