//! Draws against exact probabilities and hand-made cuts.

use super::{
    super::sampler::{divisor, draw, uniform},
    SamplingParams,
};

fn logs(p: &[f64]) -> Vec<f32> {
    p.iter().map(|p| p.ln() as f32).collect()
}

fn frequencies(p: &[f64], params: SamplingParams) -> Vec<f64> {
    let row = logs(p);
    let n = 200_000;
    let mut counts = vec![0.0; p.len()];
    for i in 0..n {
        let drawn = draw(&row, &params, uniform(42, i)).unwrap();
        assert_eq!(drawn.logprob, row[drawn.id as usize]);
        counts[drawn.id as usize] += 1.0 / n as f64;
    }
    counts
}

fn params(temperature: f32, top_p: f32, top_k: u32) -> SamplingParams {
    SamplingParams {
        temperature,
        top_p,
        top_k,
        seed: 0,
    }
}

fn assert_near(got: &[f64], want: &[f64]) {
    for (g, w) in got.iter().zip(want) {
        // Four standard deviations of the largest bin.
        assert!(
            (g - w).abs() < 4.5e-3 && (*w > 0.0 || *g == 0.0),
            "{got:?} {want:?}"
        );
    }
}

const P: [f64; 5] = [0.1, 0.4, 0.05, 0.25, 0.2];

#[test]
fn frequencies_are_the_probabilities() {
    assert_near(&frequencies(&P, params(1.0, 1.0, 0)), &P);
}

#[test]
fn top_k_keeps_the_most_likely() {
    let want = [0.0, 0.4 / 0.65, 0.0, 0.25 / 0.65, 0.0];
    assert_near(&frequencies(&P, params(1.0, 1.0, 2)), &want);
}

#[test]
fn top_p_keeps_the_smallest_set_that_reaches_it() {
    let want = [0.0, 0.4 / 0.85, 0.0, 0.25 / 0.85, 0.2 / 0.85];
    assert_near(&frequencies(&P, params(1.0, 0.8, 0)), &want);
    // After top_k the rest counts as one: 0.4/0.65 alone reaches 0.6.
    assert_near(&frequencies(&P, params(1.0, 0.6, 2)), &[0.0, 1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn greedy_takes_the_first_of_the_largest() {
    let drawn = draw(&logs(&[0.3, 0.35, 0.35]), &params(0.0, 1.0, 0), 0.999).unwrap();
    assert_eq!(drawn.id, 1);
    assert_eq!(divisor(&params(0.0, 1.0, 0)), 1.0);
    assert_eq!(divisor(&params(0.5, 1.0, 0)), 0.5);
}

#[test]
fn ends_of_the_unit_interval_are_safe() {
    let row = logs(&[0.0, 0.5, 0.5, 0.0]);
    assert_eq!(draw(&row, &params(1.0, 1.0, 0), 0.0).unwrap().id, 1);
    assert_eq!(draw(&row, &params(1.0, 1.0, 0), 1.0 - 1e-16).unwrap().id, 2);
}

#[test]
fn rows_without_numbers_give_nothing() {
    assert!(draw(&[0.0, f32::NAN], &params(1.0, 1.0, 0), 0.5).is_none());
    assert!(draw(&[f32::NEG_INFINITY; 3], &params(1.0, 1.0, 0), 0.5).is_none());
    assert!(draw(&[], &params(1.0, 1.0, 0), 0.5).is_none());
    assert!(params(-1.0, 1.0, 0).check().is_err() && params(1.0, 1.1, 0).check().is_err());
}

#[test]
fn streams_of_neighbouring_seeds_are_uniform_and_unrelated() {
    let n = 20_000;
    for seed in [0u64, 1, 2, u64::MAX] {
        let mut bins = [0usize; 20];
        let mut product = 0.0;
        for i in 0..n {
            let u = uniform(seed, i);
            assert!((0.0..1.0).contains(&u));
            bins[(u * 20.0) as usize] += 1;
            product += (u - 0.5) * (uniform(seed.wrapping_add(1), i) - 0.5)
                + (u - 0.5) * (uniform(seed, i + 1) - 0.5);
        }
        // Chi-squared with 19 degrees of freedom: 50 is beyond one in ten thousand.
        let expected = n as f64 / 20.0;
        let chi: f64 = bins
            .iter()
            .map(|b| (*b as f64 - expected).powi(2) / expected)
            .sum();
        assert!(chi < 50.0, "{seed}: {chi}");
        assert!((product / n as f64).abs() < 4e-3, "{seed}: {product}");
    }
}
