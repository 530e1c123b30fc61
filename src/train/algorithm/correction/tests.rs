//! Importance weights and rejection against masked loops that know nothing of the code.

use super::*;
use proptest::prelude::*;

fn pair<'a>(rollout: &'a [f64], training: &'a [f64]) -> SequencePair<'a> {
    SequencePair { rollout, training }
}

fn weights(level: ImportanceLevel, bounds: WeightBounds) -> ImportanceWeights {
    ImportanceWeights {
        level,
        bounds,
        normalize: false,
    }
}

const TRUNCATE: WeightBounds = WeightBounds::Truncate { upper: 2.0 };
const MASK: WeightBounds = WeightBounds::Mask {
    lower: 0.6,
    upper: 2.0,
};

#[test]
fn weights_are_bounded_by_token_and_by_sequence() {
    // Ratios 3 and 0.55; product 1.65.
    let rollout = [-2.0, -2.0];
    let training = [-2.0 + 3f64.ln(), -2.0 + 0.55f64.ln()];
    let by = |level, bounds| {
        let (mut rows, metrics) = weights(level, bounds).of_batch(&[(1.0, pair(&rollout, &training))]);
        (rows.remove(0), metrics.unwrap())
    };
    let close = |got: &[f64], want: &[f64]| {
        assert!(
            got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-12),
            "{got:?}"
        );
    };
    let (row, m) = by(ImportanceLevel::Token, TRUNCATE);
    close(&row, &[2.0, 0.55]);
    close(&[m.mean, m.max, m.min], &[1.275, 2.0, 0.55]);
    close(&[m.fraction_high, m.fraction_low], &[0.5, 0.0]);
    close(&[m.eff_sample_size], &[1.275 * 1.275 / 2.15125]);
    assert_eq!(m.out_of_bounds, None);
    let (row, m) = by(ImportanceLevel::Token, MASK);
    assert_eq!(row, [0.0, 0.0], "3 is above, 0.55 below");
    assert_eq!((m.out_of_bounds, m.eff_sample_size), (Some(1.0), 0.0));
    let (row, m) = by(ImportanceLevel::Sequence, MASK);
    close(&row, &[1.65, 1.65]);
    close(&[m.max, m.fraction_high, m.eff_sample_size], &[1.65, 0.0, 1.0]);
}

#[test]
fn normalised_weights_have_the_mean_one_by_trial_share() {
    let (a, b) = ([-1.0, -1.0], [-1.0]);
    let (up, down) = ([-1.0 + 1.5f64.ln(); 2], [-1.0 - 2f64.ln()]);
    for level in [ImportanceLevel::Token, ImportanceLevel::Sequence] {
        let importance = ImportanceWeights {
            normalize: true,
            ..weights(level, WeightBounds::Truncate { upper: 10.0 })
        };
        let shares = [0.25, 1.0];
        let (rows, metrics) =
            importance.of_batch(&[(shares[0], pair(&a, &up)), (shares[1], pair(&b, &down))]);
        let mean = match level {
            ImportanceLevel::Token => (0.25 * (rows[0][0] + rows[0][1]) + rows[1][0]) / 1.5,
            ImportanceLevel::Sequence => (0.25 * rows[0][0] + rows[1][0]) / 1.25,
        };
        assert!((mean - 1.0).abs() < 1e-12, "{level:?}");
        assert!(metrics.unwrap().norm_factor.is_some());
    }
    let empty = weights(ImportanceLevel::Token, TRUNCATE).of_batch(&[(1.0, pair(&[], &[]))]);
    assert_eq!(empty, (vec![vec![]], None));
}

fn criterion(name: &'static str, extent: Extent, distance: Distance, lower: f64, upper: f64) -> Criterion {
    Criterion {
        name,
        extent,
        distance,
        lower,
        upper,
    }
}

#[test]
fn what_fails_any_criterion_is_out() {
    let ln2 = 2f64.ln();
    let rollout = [-1.0, -1.0, -1.0];
    let training = [-1.0, -1.0 + ln2, -1.0 - 3.0];
    let token = criterion("token_k1", Extent::Token, Distance::K1, -0.5, 3.5);
    let k3 = criterion("token_k3", Extent::Token, Distance::K3, f64::NEG_INFINITY, 1.0);
    let mut metrics = RejectionMetrics::default();
    let both = Rejection {
        criteria: vec![token, k3],
    };
    // −r = (0, −ln 2, 3); k3 = (0, 1 − ln 2, e⁻³ + 2).
    assert_eq!(
        both.keep(pair(&rollout, &training), &mut metrics),
        [true, false, false]
    );
    assert_eq!(both.keep(pair(&[-1.0], &[-1.0]), &mut metrics), [true]);
    let named: std::collections::BTreeMap<_, _> = metrics.named().into_iter().collect();
    let get = |key: &str| named[&format!("rollout_corr/rollout_rs_{key}")];
    assert_eq!((get("masked_fraction"), get("seq_masked_fraction")), (0.5, 0.5));
    assert_eq!(get("token_k1_masked_fraction"), 0.25);
    assert_eq!(get("token_k3_masked_fraction"), 0.25);

    // Whole sequences: the mean of k1 is (3 − ln 2)/3 ≈ 0.77, its sum 2.3; the largest k2 is 4.5.
    let whole = |extent, distance, lower, upper| {
        let rejection = Rejection {
            criteria: vec![criterion("seq", extent, distance, lower, upper)],
        };
        rejection.keep(pair(&rollout, &training), &mut RejectionMetrics::default())
    };
    assert_eq!(whole(Extent::SequenceMean, Distance::K1, -1.0, 0.8), [true; 3]);
    assert_eq!(whole(Extent::SequenceMean, Distance::K1, -1.0, 0.7), [false; 3]);
    assert_eq!(whole(Extent::SequenceMean, Distance::K1, 0.8, 9.0), [false; 3]);
    assert_eq!(whole(Extent::SequenceSum, Distance::K1, -9.0, 2.4), [true; 3]);
    assert_eq!(whole(Extent::SequenceSum, Distance::K1, -9.0, 2.2), [false; 3]);
    assert_eq!(
        whole(Extent::SequenceMax, Distance::K2, f64::NEG_INFINITY, 4.6),
        [true; 3]
    );
    assert_eq!(
        whole(Extent::SequenceMax, Distance::K2, f64::NEG_INFINITY, 4.4),
        [false; 3]
    );
    assert!(RejectionMetrics::default().named().is_empty());
}

/// Rows of `(rollout, log ratio, is sampled)` as verl lays them out: padded, with masks.
fn batches() -> impl Strategy<Value = Vec<Vec<(f64, f64, bool)>>> {
    let token = (
        -4.0..-0.1f64,
        prop_oneof![-1.5..1.5f64, -30.0..30.0f64],
        prop::bool::weighted(0.7),
    );
    prop::collection::vec(prop::collection::vec(token, 0..7), 1..5)
}

/// The formulas of the module heads over masked rows, one sum after the other.
mod reference {
    pub fn ratio(row: &[(f64, f64, bool)], t: usize, level: &str) -> f64 {
        let mut exponent = 0.0;
        for (u, token) in row.iter().enumerate() {
            if token.2 && (level == "sequence" || u == t) {
                exponent += token.1;
            }
        }
        exponent.clamp(-20.0, 20.0).exp()
    }

    pub fn distance(kind: u8, r: f64) -> f64 {
        let r = r.signum() * r.abs().min(20.0);
        match kind {
            1 => -r,
            2 => r.powi(2) / 2.0,
            _ => f64::exp(r) - r - 1.0,
        }
    }
}

proptest! {
    #[test]
    fn weights_agree_with_masked_loops(rows in batches(), lower in 0.2..0.9f64, upper in 1.1..5.0f64) {
        let kept = |f: fn(&(f64, f64, bool)) -> f64| -> Vec<Vec<f64>> {
            rows.iter().map(|row| row.iter().filter(|t| t.2).map(f).collect()).collect()
        };
        let (rollout, training) = (kept(|t| t.0), kept(|t| t.0 + t.1));
        let pairs: Vec<_> = rollout.iter().zip(&training).map(|(r, t)| (1.0, pair(r, t))).collect();
        for (level, name) in [(ImportanceLevel::Token, "token"), (ImportanceLevel::Sequence, "sequence")] {
            for bounds in [WeightBounds::Truncate { upper }, WeightBounds::Mask { lower, upper }] {
                let (got, metrics) = weights(level, bounds).of_batch(&pairs);
                let (mut sum, mut square, mut count, mut outside) = (0.0, 0.0, 0.0, 0.0);
                for (i, row) in rows.iter().enumerate() {
                    let mut place = 0;
                    for t in 0..row.len() {
                        if !row[t].2 {
                            continue;
                        }
                        let raw = reference::ratio(row, t, name);
                        let want = match bounds {
                            WeightBounds::Truncate { .. } => if raw > upper { upper } else { raw },
                            WeightBounds::Mask { .. } => if raw < lower || raw > upper { 0.0 } else { raw },
                        };
                        prop_assert!((got[i][place] - want).abs() < 1e-6 * (1.0 + want));
                        place += 1;
                        sum += want;
                        square += want * want;
                        count += 1.0;
                        outside += f64::from(raw < lower || raw > upper);
                    }
                    prop_assert_eq!(place, got[i].len());
                }
                prop_assert_eq!(metrics.is_none(), count == 0.0);
                if let Some(m) = metrics {
                    prop_assert!((m.mean - sum / count).abs() < 1e-6);
                    if square > 0.0 {
                        // (Σw)² / (n Σw²)
                        prop_assert!((m.eff_sample_size - sum * sum / (count * square)).abs() < 1e-6);
                    }
                    if let Some(out) = m.out_of_bounds {
                        prop_assert!((out - outside / count).abs() < 1e-12);
                    }
                }
            }
        }
    }

    #[test]
    fn rejection_agrees_with_masked_loops(rows in batches(), upper in 0.05..2.0f64) {
        let extents = [Extent::Token, Extent::SequenceSum, Extent::SequenceMean, Extent::SequenceMax];
        for (place, extent) in extents.into_iter().enumerate() {
            for (kind, distance) in [(1, Distance::K1), (2, Distance::K2), (3, Distance::K3)] {
                let lower = if kind == 1 { -upper } else { f64::NEG_INFINITY };
                let rejection = Rejection { criteria: vec![criterion("c", extent, distance, lower, upper)] };
                for row in &rows {
                    let sampled: Vec<_> = row.iter().filter(|t| t.2).collect();
                    let rollout: Vec<f64> = sampled.iter().map(|t| t.0).collect();
                    let training: Vec<f64> = sampled.iter().map(|t| t.0 + t.1).collect();
                    let got = rejection.keep(pair(&rollout, &training), &mut RejectionMetrics::default());
                    let (mut sum, mut max) = (0.0, f64::NEG_INFINITY);
                    for t in &sampled {
                        let d = reference::distance(kind, t.1);
                        sum += d;
                        if d > max { max = d; }
                    }
                    for (t, got) in sampled.iter().zip(got) {
                        let looked_at = [reference::distance(kind, t.1), sum, sum / sampled.len() as f64, max][place];
                        // Rounding decides at the bound itself.
                        if (looked_at - upper).abs() > 1e-9 && (looked_at - lower).abs() > 1e-9 {
                            prop_assert_eq!(got, lower <= looked_at && looked_at <= upper);
                        }
                    }
                }
            }
        }
    }
}
