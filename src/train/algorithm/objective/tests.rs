//! Losses against padded formulas, and their derivatives against finite differences.

use super::*;
use rand::{Rng, SeedableRng};

/// verl's formulas over padded `[batch, time]` arrays with masks, in plain loops: another style and
/// another data layout than the code under test. Returns loss, pg loss, kl loss, entropy, clip fraction,
/// lower clip fraction and ppo_kl.
#[expect(clippy::needless_range_loop, reason = "written as formulas over indices")]
mod reference {
    pub struct Padded {
        pub logprob: Vec<Vec<f64>>,
        pub old: Vec<Vec<f64>>,
        pub reference: Vec<Vec<f64>>,
        pub entropy: Vec<Vec<f64>>,
        pub advantage: Vec<Vec<f64>>,
        pub mask: Vec<Vec<f64>>,
    }

    pub fn masked_mean(x: &[Vec<f64>], mask: &[Vec<f64>]) -> f64 {
        let (mut top, mut bottom) = (0.0, 0.0);
        for i in 0..x.len() {
            for j in 0..x[i].len() {
                top += x[i][j] * mask[i][j];
                bottom += mask[i][j];
            }
        }
        top / (bottom + 1e-8)
    }

    pub fn agg(x: &[Vec<f64>], mask: &[Vec<f64>], mode: &str) -> f64 {
        if mode == "token-mean" {
            return masked_mean(x, mask);
        }
        let mut total = 0.0;
        let mut rows = 0.0;
        for i in 0..x.len() {
            let n: f64 = mask[i].iter().sum();
            if n == 0.0 {
                continue;
            }
            rows += 1.0;
            let s: f64 = x[i].iter().zip(&mask[i]).map(|(a, b)| a * b).sum();
            total += if mode == "seq-mean-token-sum" { s } else { s / n };
        }
        total / rows
    }

    pub fn vanilla(b: &Padded, low: f64, high: f64, c: f64, mode: &str) -> [f64; 4] {
        let map = |f: &dyn Fn(usize, usize) -> f64| -> Vec<Vec<f64>> {
            (0..b.mask.len())
                .map(|i| (0..b.mask[i].len()).map(|j| f(i, j)).collect())
                .collect()
        };
        let neg_kl = map(&|i, j| (b.logprob[i][j] - b.old[i][j]).clamp(-20.0, 20.0));
        let l1 = map(&|i, j| -b.advantage[i][j] * neg_kl[i][j].exp());
        let l2 = map(&|i, j| -b.advantage[i][j] * neg_kl[i][j].exp().clamp(1.0 - low, 1.0 + high));
        let clip1 = map(&|i, j| l1[i][j].max(l2[i][j]));
        let l3 = map(&|i, j| -b.advantage[i][j] * c);
        let frac = map(&|i, j| f64::from(l2[i][j] > l1[i][j]));
        let lower = map(&|i, j| f64::from(clip1[i][j] > l3[i][j] && b.advantage[i][j] < 0.0));
        let loss = map(&|i, j| {
            if b.advantage[i][j] < 0.0 {
                clip1[i][j].min(l3[i][j])
            } else {
                clip1[i][j]
            }
        });
        let kl = map(&|i, j| -neg_kl[i][j]);
        [
            agg(&loss, &b.mask, mode),
            masked_mean(&frac, &b.mask),
            masked_mean(&lower, &b.mask),
            masked_mean(&kl, &b.mask),
        ]
    }

    pub fn gspo(b: &Padded, low: f64, high: f64) -> [f64; 4] {
        let mut loss = b.mask.clone();
        let mut frac = b.mask.clone();
        let mut kl = b.mask.clone();
        for i in 0..b.mask.len() {
            let n = b.mask[i].iter().sum::<f64>().max(1.0);
            let mut mean = 0.0;
            for j in 0..b.mask[i].len() {
                kl[i][j] = b.old[i][j] - b.logprob[i][j];
                mean += -kl[i][j] * b.mask[i][j] / n;
            }
            let s = mean.min(10.0).exp();
            for j in 0..b.mask[i].len() {
                let l1 = -b.advantage[i][j] * s;
                let l2 = -b.advantage[i][j] * s.clamp(1.0 - low, 1.0 + high);
                loss[i][j] = l1.max(l2);
                frac[i][j] = f64::from(l2 > l1);
            }
        }
        [
            agg(&loss, &b.mask, "seq-mean-token-mean"),
            masked_mean(&frac, &b.mask),
            0.0,
            masked_mean(&kl, &b.mask),
        ]
    }
}

fn random_batch(rng: &mut impl Rng) -> reference::Padded {
    let (rows, width) = (rng.random_range(1..6), rng.random_range(1..9));
    let mut grid = |low: f64, high: f64| -> Vec<Vec<f64>> {
        (0..rows)
            .map(|_| (0..width).map(|_| rng.random_range(low..high)).collect())
            .collect()
    };
    let old = grid(-4.0, -0.1);
    let near = |x: &[Vec<f64>], d: Vec<Vec<f64>>| -> Vec<Vec<f64>> {
        x.iter()
            .zip(d)
            .map(|(a, b)| a.iter().zip(b).map(|(x, y)| x + y).collect())
            .collect()
    };
    let step = grid(-1.5, 1.5);
    let logprob = near(&old, step);
    let reference = near(&old, grid(-1.0, 1.0));
    let entropy = grid(0.0, 3.0);
    let row_advantage = grid(-2.0, 2.0);
    let advantage = row_advantage.iter().map(|r| vec![r[0]; width]).collect();
    // Holes, and sometimes whole empty rows; at least one token in all.
    let mut mask: Vec<Vec<f64>> = grid(0.0, 1.0)
        .iter()
        .map(|r| r.iter().map(|x| f64::from(*x < 0.6)).collect())
        .collect();
    mask[0][0] = 1.0;
    reference::Padded {
        logprob,
        old,
        reference,
        entropy,
        advantage,
        mask,
    }
}

/// Our evaluation of the same batch: sampled tokens only.
fn evaluate(b: &reference::Padded, objective: &Objective) -> (ObjectiveSums, Vec<SequenceDerivatives>) {
    let pick = |x: &[f64], m: &[f64]| -> Vec<f64> {
        x.iter()
            .zip(m)
            .filter(|(_, m)| **m > 0.0)
            .map(|(x, _)| *x)
            .collect()
    };
    let shapes: Vec<_> = b
        .mask
        .iter()
        .map(|m| SequenceShape {
            sampled: m.iter().filter(|x| **x > 0.0).count(),
            weight: 1.0,
        })
        .collect();
    let scale = ObjectiveScale::new(objective, &shapes);
    let mut sums = ObjectiveSums::default();
    let derivatives = (0..b.mask.len())
        .map(|i| {
            let m = &b.mask[i];
            let terms = SequenceTerms {
                logprobs: &pick(&b.logprob[i], m),
                old_logprobs: &pick(&b.old[i], m),
                reference_logprobs: Some(&pick(&b.reference[i], m)),
                entropies: &pick(&b.entropy[i], m),
                advantages: &pick(&b.advantage[i], m),
                importance_weights: None,
            };
            objective.evaluate(&terms, &scale, i, &mut sums)
        })
        .collect();
    (sums, derivatives)
}

const MODES: [&str; 3] = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"];

fn objective(loss: &str, mode: &str) -> Objective {
    Objective {
        policy_loss: PolicyLoss::from_mode(loss, 0.2, 0.28, 3.0).unwrap(),
        aggregation: mode.parse().unwrap(),
        kl: Some(KlLoss {
            estimator: KlEstimator::K3,
            coefficient: 0.05,
        }),
        entropy_coefficient: 0.01,
    }
}

#[test]
fn values_agree_with_padded_masked_formulas() {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(1);
    for round in 0..200 {
        let batch = random_batch(&mut rng);
        for mode in MODES {
            for loss in ["vanilla", "gspo"] {
                let [pg, clip, lower, ppo_kl] = match loss {
                    "gspo" => reference::gspo(&batch, 0.2, 0.28),
                    _ => reference::vanilla(&batch, 0.2, 0.28, 3.0, mode),
                };
                let kld: Vec<Vec<f64>> = (0..batch.mask.len())
                    .map(|i| {
                        (0..batch.mask[i].len())
                            .map(|j| {
                                let d: f64 = batch.reference[i][j] - batch.logprob[i][j];
                                (d.exp() - d - 1.0).clamp(-10.0, 10.0)
                            })
                            .collect()
                    })
                    .collect();
                let kl = reference::agg(&kld, &batch.mask, mode);
                let entropy = reference::agg(&batch.entropy, &batch.mask, mode);
                let (sums, _) = evaluate(&batch, &objective(loss, mode));
                let tokens = sums.tokens as f64;
                for (name, got, want) in [
                    ("pg_loss", sums.pg_loss, pg),
                    ("kl_loss", sums.kl_loss, kl),
                    ("entropy", sums.entropy, entropy),
                    ("loss", sums.loss, pg + 0.05 * kl - 0.01 * entropy),
                    ("clip", sums.clipped as f64 / tokens, clip),
                    ("lower", sums.clipped_lower as f64 / tokens, lower),
                    ("ppo_kl", sums.ppo_kl_sum / tokens, ppo_kl),
                ] {
                    assert!(
                        (got - want).abs() < 1e-6 * (1.0 + want.abs()),
                        "round {round} {loss} {mode} {name}: {got} instead of {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn derivatives_agree_with_finite_differences() {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(2);
    let mut compared = 0;
    for _ in 0..60 {
        let batch = random_batch(&mut rng);
        for mode in MODES {
            // GSPO's token form holds the ratio constant, so its values do not differentiate to its
            // gradient token by token; gspo.rs compares it with the sequence objective instead.
            let objective = objective("vanilla", mode);
            let (_, derivatives) = evaluate(&batch, &objective);
            for i in 0..batch.mask.len() {
                let sampled: Vec<usize> = (0..batch.mask[i].len())
                    .filter(|j| batch.mask[i][*j] > 0.0)
                    .collect();
                for (t, &j) in sampled.iter().enumerate() {
                    let at = |delta: f64| {
                        let mut moved = reference::Padded {
                            logprob: batch.logprob.clone(),
                            old: batch.old.clone(),
                            reference: batch.reference.clone(),
                            entropy: batch.entropy.clone(),
                            advantage: batch.advantage.clone(),
                            mask: batch.mask.clone(),
                        };
                        moved.logprob[i][j] += delta;
                        evaluate(&moved, &objective).0.loss
                    };
                    let numeric = (at(1e-6) - at(-1e-6)) / 2e-6;
                    let got = derivatives[i].logprobs[t];
                    assert!(
                        (got - numeric).abs() < 1e-6,
                        "{mode} {i} {t}: {got} instead of {numeric}"
                    );
                    compared += 1;
                }
                // Entropy is linear in the objective.
                if let Some(&j) = sampled.first() {
                    let mut moved = batch.entropy.clone();
                    moved[i][j] += 1.0;
                    let shifted = reference::Padded {
                        logprob: batch.logprob.clone(),
                        old: batch.old.clone(),
                        reference: batch.reference.clone(),
                        entropy: moved,
                        advantage: batch.advantage.clone(),
                        mask: batch.mask.clone(),
                    };
                    let change = evaluate(&shifted, &objective).0.loss - evaluate(&batch, &objective).0.loss;
                    assert!((derivatives[i].entropies[0] - change).abs() < 1e-12);
                }
            }
        }
    }
    assert!(compared > 500);
}

#[test]
fn importance_weights_scale_the_policy_loss_alone() {
    let objective = objective("vanilla", "token-mean");
    let scale = ObjectiveScale::new(
        &objective,
        &[SequenceShape {
            sampled: 1,
            weight: 1.0,
        }],
    );
    let run = |weights: Option<&[f64]>| {
        let mut sums = ObjectiveSums::default();
        let terms = SequenceTerms {
            logprobs: &[-1.0],
            old_logprobs: &[-1.0],
            reference_logprobs: Some(&[-1.5]),
            entropies: &[0.7],
            advantages: &[1.0],
            importance_weights: weights,
        };
        let d = objective.evaluate(&terms, &scale, 0, &mut sums);
        (sums, d.logprobs[0])
    };
    let (plain, derivative) = run(None);
    let (halved, half_derivative) = run(Some(&[0.5]));
    assert_eq!(halved.pg_loss, plain.pg_loss / 2.0);
    assert_eq!(halved.kl_loss, plain.kl_loss);
    let kl_part = 0.05 * (1.0 - (-0.5f64).exp());
    assert!((derivative - (-1.0 + kl_part)).abs() < 1e-12);
    assert!((half_derivative - (-0.5 + kl_part)).abs() < 1e-12);
}

#[test]
fn an_unknown_loss_is_named() {
    let error = PolicyLoss::from_mode("trpo", 0.2, 0.2, 3.0).unwrap_err();
    assert!(error.to_string().contains("POLICY_LOSS_MODE=`trpo`"));
}
