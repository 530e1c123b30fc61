//! Whitening over the sampled tokens of a batch.
//!
//! `x ← (x − m) / sqrt(v + 1e-8)` with the mean `m` and the unbiased variance `v` over all tokens, each with
//! the weight `w_s` of its sequence. With `N = Σ_s w_s n_s`:
//!
//! `m = Σ w x / N`, `v = Σ w (x − m)² / (N − 1)`
//!
//! With all weights 1 this is verl's `masked_whiten`. Where nothing can be compared (all values equal, or
//! `N ≤ 1`) the result is exactly zero.

const EPSILON: f64 = 1e-8;

/// Whitens rows of tokens in place; each has a weight per token.
pub fn whiten(rows: &mut [(f64, &mut [f64])]) {
    let count: f64 = rows.iter().map(|(weight, row)| weight * row.len() as f64).sum();
    let all = || rows.iter().flat_map(|(_, row)| row.iter().copied());
    let all_equal = all().zip(all().skip(1)).all(|(a, b)| a == b);
    if all_equal || count <= 1.0 {
        for (_, row) in rows {
            row.fill(0.0);
        }
        return;
    }
    let sum = |f: &dyn Fn(f64) -> f64| -> f64 {
        rows.iter()
            .map(|(weight, row)| weight * row.iter().map(|x| f(*x)).sum::<f64>())
            .sum()
    };
    let mean = sum(&|x| x) / count;
    let variance = sum(&|x| (x - mean) * (x - mean)) / (count - 1.0);
    let factor = 1.0 / (variance + EPSILON).sqrt();
    for x in rows.iter_mut().flat_map(|(_, row)| row.iter_mut()) {
        *x = (*x - mean) * factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        let (mut a, mut b) = ([1.0, 3.0], [5.0]);
        whiten(&mut [(1.0, &mut a), (1.0, &mut b)]);
        // Mean 3, variance (4 + 0 + 4) / 2.
        let unit = 2.0 / (4.0f64 + 1e-8).sqrt();
        assert_eq!((a, b), ([-unit, 0.0], [unit]));
    }

    #[test]
    fn a_sequence_of_weight_two_counts_like_two_of_them() {
        let (mut once, mut other) = ([1.0, 2.0], [4.0]);
        whiten(&mut [(2.0, &mut once), (1.0, &mut other)]);
        let (mut first, mut second, mut third) = ([1.0, 2.0], [1.0, 2.0], [4.0]);
        whiten(&mut [(1.0, &mut first), (1.0, &mut second), (1.0, &mut third)]);
        for (x, y) in once.iter().chain(&other).zip(first.iter().chain(&third)) {
            assert!((x - y).abs() < 1e-12);
        }
    }

    #[test]
    fn nothing_to_compare_is_exactly_zero() {
        let (mut a, mut b) = ([0.1, 0.1], [0.1]);
        whiten(&mut [(1.0, &mut a), (0.5, &mut b)]);
        assert_eq!((a, b), ([0.0; 2], [0.0]));
        let mut single = [7.0];
        whiten(&mut [(1.0, &mut single)]);
        assert_eq!(single, [0.0]);
        let (mut left, mut right) = ([7.0], [3.0]);
        whiten(&mut [(0.5, &mut left), (0.5, &mut right)]);
        assert_eq!((left, right), ([0.0], [0.0]), "one trial in all");
        whiten(&mut []);
    }
}
