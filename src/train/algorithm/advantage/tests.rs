//! Advantages against padded loops that know nothing of the code.

use super::*;
use proptest::prelude::*;

/// The papers' and verl's formulas over padded rows with masks, in plain loops: another layout and
/// another style than the code under test.
#[expect(clippy::needless_range_loop, reason = "written as formulas over indices")]
mod reference {
    /// One row of a padded batch.
    #[derive(Clone, Debug)]
    pub struct Row {
        /// Trial that the row belongs to; rows of a trial share the weight 1.
        pub trial: usize,
        pub weight: f64,
        pub reward: f64,
        /// Sampled or not, with holes.
        pub mask: Vec<bool>,
        pub penalty: Vec<f64>,
        pub value: Vec<f64>,
    }

    /// Rewards by place: minus the penalty, plus the reward at the last sampled place.
    pub fn token_rewards(row: &Row) -> Vec<f64> {
        let mut out = vec![0.0; row.mask.len()];
        let mut last = None;
        for j in 0..row.mask.len() {
            if row.mask[j] {
                out[j] = -row.penalty[j];
                last = Some(j);
            }
        }
        if let Some(j) = last {
            out[j] += row.reward;
        }
        out
    }

    /// Score of every trial: its reward minus the weighted penalties of its rows.
    pub fn scores(rows: &[Row], rewards: &[(usize, f64)]) -> Vec<f64> {
        let mut out: Vec<f64> = rewards.iter().map(|r| r.1).collect();
        for row in rows {
            for j in 0..row.mask.len() {
                if row.mask[j] {
                    out[row.trial] -= row.weight * row.penalty[j];
                }
            }
        }
        out
    }

    pub fn grpo(scores: &[f64], groups: &[(usize, f64)], by_std: bool) -> Vec<f64> {
        let mut out = vec![0.0; scores.len()];
        for i in 0..scores.len() {
            let (mut n, mut sum) = (0.0, 0.0);
            for k in 0..scores.len() {
                if groups[k].0 == groups[i].0 {
                    n += 1.0;
                    sum += scores[k];
                }
            }
            let mut square = 0.0;
            for k in 0..scores.len() {
                if groups[k].0 == groups[i].0 {
                    square += (scores[k] - sum / n) * (scores[k] - sum / n);
                }
            }
            if n > 1.0 {
                out[i] = scores[i] - sum / n;
                if by_std {
                    out[i] /= (square / (n - 1.0)).sqrt() + 1e-6;
                }
            }
        }
        out
    }

    /// The reward minus the mean of the others, by leaving one out in turn.
    pub fn rloo(scores: &[f64], groups: &[(usize, f64)]) -> Vec<f64> {
        let mut out = vec![0.0; scores.len()];
        for i in 0..scores.len() {
            let (mut others, mut sum) = (0.0, 0.0);
            for k in 0..scores.len() {
                if k != i && groups[k].0 == groups[i].0 {
                    others += 1.0;
                    sum += scores[k];
                }
            }
            if others > 0.0 {
                out[i] = scores[i] - sum / others;
            }
        }
        out
    }

    /// The return as the discounted sum itself, not by recursion.
    pub fn returns(row: &Row, gamma: f64) -> Vec<f64> {
        let rewards = token_rewards(row);
        let mut out = vec![0.0; row.mask.len()];
        for j in 0..row.mask.len() {
            let mut discount = 1.0;
            for k in j..row.mask.len() {
                if row.mask[k] && row.mask[j] {
                    out[j] += discount * rewards[k];
                    discount *= gamma;
                }
            }
        }
        out
    }

    /// Generalised advantage as the weighted mean of k-step advantages (Schulman et al., equation 16 as a
    /// sum): `Σ_k (γλ)^k δ_{t+k}` over the sampled places.
    pub fn gae(row: &Row, gamma: f64, lambda: f64) -> Vec<f64> {
        let rewards = token_rewards(row);
        let places: Vec<usize> = (0..row.mask.len()).filter(|j| row.mask[*j]).collect();
        let mut out = vec![0.0; row.mask.len()];
        for a in 0..places.len() {
            for k in a..places.len() {
                let next = if k + 1 < places.len() {
                    row.value[places[k + 1]]
                } else {
                    0.0
                };
                let delta = rewards[places[k]] + gamma * next - row.value[places[k]];
                out[places[a]] += (gamma * lambda).powi((k - a) as i32) * delta;
            }
        }
        out
    }

    /// Whitened sampled places, every row with its weight.
    pub fn whiten(rows: &[Row], x: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let (mut n, mut sum) = (0.0, 0.0);
        for i in 0..rows.len() {
            for j in 0..rows[i].mask.len() {
                if rows[i].mask[j] {
                    n += rows[i].weight;
                    sum += rows[i].weight * x[i][j];
                }
            }
        }
        let mut square = 0.0;
        for i in 0..rows.len() {
            for j in 0..rows[i].mask.len() {
                if rows[i].mask[j] {
                    square += rows[i].weight * (x[i][j] - sum / n).powi(2);
                }
            }
        }
        let mut out = x.to_vec();
        for i in 0..rows.len() {
            for j in 0..rows[i].mask.len() {
                out[i][j] = (x[i][j] - sum / n) / (square / (n - 1.0) + 1e-8).sqrt();
            }
        }
        out
    }
}

/// `(group, reward)` of each trial, and rows of its sequences; trials without any row happen.
type Batch = (Vec<(usize, f64)>, Vec<reference::Row>);

fn batches() -> impl Strategy<Value = Batch> {
    // One-token responses and rows without any sampled token happen often.
    let token = (prop::bool::weighted(0.6), -0.5..0.5f64, -2.0..2.0f64);
    let rows = prop::collection::vec((prop::collection::vec(token, 1..6), 0.1..1.0f64), 0..3);
    let reward = prop_oneof![Just(0.0), Just(1.0), -2.0..2.0f64];
    prop::collection::vec((0usize..3, reward, rows), 0..9).prop_map(|trials| {
        let mut numbers = Vec::new();
        let mut out = Vec::new();
        for (trial, (group, reward, rows)) in trials.into_iter().enumerate() {
            numbers.push((group, reward));
            let total: f64 = rows.iter().map(|r| r.1).sum();
            for (tokens, weight) in rows {
                out.push(reference::Row {
                    trial,
                    weight: weight / total,
                    reward,
                    mask: tokens.iter().map(|t| t.0).collect(),
                    penalty: tokens.iter().map(|t| t.1).collect(),
                    value: tokens.iter().map(|t| t.2).collect(),
                });
            }
        }
        (numbers, out)
    })
}

fn picked(x: &[f64], mask: &[bool]) -> Vec<f64> {
    x.iter().zip(mask).filter(|(_, m)| **m).map(|(x, _)| *x).collect()
}

fn trials((numbers, rows): &Batch) -> Vec<TrialReward> {
    let sequence = |row: &reference::Row| SequenceReward {
        weight: row.weight,
        penalties: picked(&row.penalty, &row.mask),
        values: picked(&row.value, &row.mask),
    };
    let of = |trial: usize| rows.iter().filter(move |row| row.trial == trial);
    numbers
        .iter()
        .enumerate()
        .map(|(place, &(group, reward))| TrialReward {
            group,
            reward,
            sequences: of(place).map(sequence).collect(),
        })
        .collect()
}

/// Compares with expected numbers by row and place.
fn assert_rows(
    batch: &Batch,
    got: &[Vec<TokenAdvantages>],
    want: &[Vec<f64>],
    what: &str,
) -> Result<(), TestCaseError> {
    let flat: Vec<&TokenAdvantages> = got.iter().flatten().collect();
    prop_assert_eq!(flat.len(), batch.1.len());
    for ((got, row), want) in flat.iter().zip(&batch.1).zip(want) {
        let want = picked(want, &row.mask);
        prop_assert_eq!(got.advantages.len(), want.len());
        for (g, w) in got.advantages.iter().zip(want) {
            prop_assert!(
                (g - w).abs() < 1e-6 * (1.0 + w.abs()),
                "{}: {} instead of {}",
                what,
                g,
                w
            );
        }
    }
    Ok(())
}

fn by_trial(batch: &Batch, numbers: &[f64]) -> Vec<Vec<f64>> {
    let row = |r: &reference::Row| vec![numbers[r.trial]; r.mask.len()];
    batch.1.iter().map(row).collect()
}

/// True where whitening divides by something: more than one token in weight, and values that differ.
fn varies(batch: &Batch, x: &[Vec<f64>]) -> bool {
    let mut weight = 0.0;
    let mut seen: Vec<f64> = Vec::new();
    for (row, x) in batch.1.iter().zip(x) {
        for (x, mask) in x.iter().zip(&row.mask) {
            if *mask {
                weight += row.weight;
                seen.push(*x);
            }
        }
    }
    // Differences of rounding alone are enlarged by the division; no claim is made about them.
    weight > 1.001 && seen.iter().any(|x| (x - seen[0]).abs() > 1e-6)
}

proptest! {
    #[test]
    fn estimators_agree_with_padded_loops(batch in batches(), gamma in 0.5..1.0f64, lambda in 0.0..1.0f64) {
        let trials = trials(&batch);
        let scores = reference::scores(&batch.1, &batch.0);
        for (trial, score) in trials.iter().zip(&scores) {
            prop_assert!((trial.score() - score).abs() < 1e-9);
        }
        let close_scores = |group: usize| {
            let of: Vec<f64> = scores.iter().zip(&batch.0).filter(|(_, g)| g.0 == group).map(|(s, _)| *s).collect();
            of.iter().any(|s| s != &of[0] && (s - of[0]).abs() < 1e-4)
        };
        prop_assume!((0..3).all(|g| !close_scores(g)));
        for divide_by_std in [false, true] {
            let want = reference::grpo(&scores, &batch.0, divide_by_std);
            let got = AdvantageEstimator::Grpo { divide_by_std }.estimate(&trials);
            assert_rows(&batch, &got, &by_trial(&batch, &want), "grpo")?;
        }
        let want = reference::rloo(&scores, &batch.0);
        assert_rows(&batch, &AdvantageEstimator::Rloo.estimate(&trials), &by_trial(&batch, &want), "rloo")?;

        let returns: Vec<_> = batch.1.iter().map(|row| reference::returns(row, gamma)).collect();
        if varies(&batch, &returns) {
            let got = AdvantageEstimator::ReinforcePlusPlus { gamma }.estimate(&trials);
            assert_rows(&batch, &got, &reference::whiten(&batch.1, &returns), "reinforce++")?;
        }
        let centred = by_trial(&batch, &reference::grpo(&scores, &batch.0, false));
        if varies(&batch, &centred) {
            let got = AdvantageEstimator::ReinforcePlusPlusBaseline.estimate(&trials);
            assert_rows(&batch, &got, &reference::whiten(&batch.1, &centred), "reinforce++ baseline")?;
        }
        let gae: Vec<_> = batch.1.iter().map(|row| reference::gae(row, gamma, lambda)).collect();
        let got = AdvantageEstimator::Gae { gamma, lambda }.estimate(&trials);
        if varies(&batch, &gae) {
            assert_rows(&batch, &got, &reference::whiten(&batch.1, &gae), "gae")?;
        }
        for ((got, row), gae) in got.iter().flatten().zip(&batch.1).zip(&gae) {
            let want: Vec<f64> = gae.iter().zip(&row.value).map(|(a, v)| a + v).collect();
            for (g, w) in got.returns.iter().zip(picked(&want, &row.mask)) {
                prop_assert!((g - w).abs() < 1e-9);
            }
        }
    }

    /// A trial that is cut into sequences with the same content and a share each changes nothing for the
    /// others, and its parts get what the whole got.
    #[test]
    fn sequences_of_a_trial_count_as_one(batch in batches(), parts in 2usize..4, gamma in 0.5..1.0f64) {
        let whole = trials(&batch);
        let mut cut = whole.clone();
        for trial in &mut cut {
            let copies = |s: &SequenceReward| {
                let mut part = s.clone();
                part.weight /= parts as f64;
                vec![part; parts]
            };
            trial.sequences = trial.sequences.iter().flat_map(copies).collect();
        }
        for estimator in [
            AdvantageEstimator::Grpo { divide_by_std: false },
            AdvantageEstimator::Rloo,
            AdvantageEstimator::ReinforcePlusPlus { gamma },
            AdvantageEstimator::ReinforcePlusPlusBaseline,
            AdvantageEstimator::Gae { gamma, lambda: 0.9 },
        ] {
            let (one, many) = (estimator.estimate(&whole), estimator.estimate(&cut));
            for (one, many) in one.iter().zip(&many) {
                for (place, part) in many.iter().enumerate() {
                    for (a, b) in one[place / parts].advantages.iter().zip(&part.advantages) {
                        // Rounding is all that differs where a batch hardly varies.
                        prop_assert!((a - b).abs() < 1e-6 || a.abs() + b.abs() < 1e-3, "{:?}: {} {}", estimator, a, b);
                    }
                }
            }
        }
    }
}

#[test]
fn equal_rewards_teach_nothing_and_an_empty_batch_is_empty() {
    let sequence = SequenceReward {
        weight: 1.0,
        penalties: vec![0.0; 3],
        values: vec![0.0; 3],
    };
    let equal: Vec<TrialReward> = (0..4)
        .map(|place| TrialReward {
            group: place / 2,
            reward: 0.1,
            sequences: vec![sequence.clone()],
        })
        .collect();
    for estimator in [
        AdvantageEstimator::Grpo { divide_by_std: true },
        AdvantageEstimator::Rloo,
        AdvantageEstimator::ReinforcePlusPlus { gamma: 1.0 },
        AdvantageEstimator::ReinforcePlusPlusBaseline,
        AdvantageEstimator::Gae {
            gamma: 1.0,
            lambda: 1.0,
        },
    ] {
        let got = estimator.estimate(&equal);
        assert!(
            got.iter().flatten().all(|s| s.advantages == [0.0; 3]),
            "{estimator:?}"
        );
        assert!(estimator.estimate(&[]).is_empty());
        // A trial whose agent never called the model still counts in its group.
        let mut silent = equal.clone();
        silent[1].sequences.clear();
        silent[1].reward = 1.1;
        let got = estimator.estimate(&silent);
        assert!(got[1].is_empty());
        if matches!(
            estimator,
            AdvantageEstimator::Grpo { .. } | AdvantageEstimator::Rloo
        ) {
            assert!(got[0][0].advantages[0] < -0.4, "{estimator:?}");
            assert_eq!(got[2][0].advantages, [0.0; 3]);
        }
    }
}
