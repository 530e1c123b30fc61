//! The parts of a step that are not matrix products, on plain slices.
//!
//! Each function has one body that the compiler vectorises; on x86-64 with AVX2 and FMA a second copy of
//! the body is compiled for them and chosen at run time.

use super::pages::PAGE_TOKENS;

/// Compiles `$body` for the baseline and for AVX2 with FMA, and calls what the machine has.
macro_rules! dispatch {
    ($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*) = $body:ident) => {
        $(#[$doc])*
        pub(super) fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn wide($($arg: $ty),*) {
                    $body::<true>($($arg),*)
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: the machine has the features that the function was compiled for.
                    return unsafe { wide($($arg),*) };
                }
            }
            $body::<false>($($arg),*)
        }
    };
}

dispatch! {
    /// `y = x · rsqrt(mean(x²) + eps) · w`, row by row.
    rms_norm_rows(y: &mut [f32], x: &[f32], weight: &[f32], eps: f32) = rms_norm_rows_body
}
dispatch! {
    /// `y[t] = silu(x[t][..n]) · x[t][n..]` where `n` is the row length of `y`.
    silu_mul(y: &mut [f32], x: &[f32], n: usize) = silu_mul_body
}
dispatch! {
    /// Scores of one page: `scores[g][s] = q[g] · keys[.][s]`, keys `[d][PAGE_TOKENS]`, `scale` included.
    /// `scores` has rows of `stride`; `q` is `[groups][d]`.
    page_scores(scores: &mut [f32], stride: usize, q: &[f32], keys: &[f32], scale: f32) = page_scores_body
}
dispatch! {
    /// Softmax of a row in place, f32, the largest subtracted first.
    softmax(row: &mut [f32]) = softmax_body
}
dispatch! {
    /// `out[g] += weights[g][..count] · values[..count]`, values `[PAGE_TOKENS][d]`, `out` `[groups][d]`.
    page_values(out: &mut [f32], weights: &[f32], stride: usize, values: &[f32], count: usize, d: usize) = page_values_body
}

#[inline(always)]
fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

/// `e^x` with a relative error below 2e-7 for x in [-87, 88]; smaller x give (nearly) 0. Cody and Waite's
/// reduction to `2^n · e^r` with |r| ≤ ln2/2 and a Taylor polynomial of degree 7.
#[inline(always)]
fn exp<const FMA: bool>(x: f32) -> f32 {
    let x = x.clamp(-87.0, 88.0);
    // Adding 1.5·2^23 rounds to an integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let shifted = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fma::<FMA>(n, -0.693_359_4, x);
    let r = fma::<FMA>(n, 2.121_944_4e-4, r);
    let mut p = fma::<FMA>(r, 1.0 / 5040.0, 1.0 / 720.0);
    p = fma::<FMA>(p, r, 1.0 / 120.0);
    p = fma::<FMA>(p, r, 1.0 / 24.0);
    p = fma::<FMA>(p, r, 1.0 / 6.0);
    p = fma::<FMA>(p, r, 0.5);
    p = fma::<FMA>(p, r, 1.0);
    p = fma::<FMA>(p, r, 1.0);
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127).wrapping_shl(23));
    p * power
}

/// Lanes that partial sums are kept in.
const LANES: usize = 16;

#[inline(always)]
fn sum_of_squares<const FMA: bool>(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest: f32 = chunks.remainder().iter().map(|v| v * v).sum();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane = fma::<FMA>(*v, *v, *lane);
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// One row of [`rms_norm_rows`].
#[inline(always)]
fn rms_norm_row<const FMA: bool>(y: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    let mean = sum_of_squares::<FMA>(x) / x.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
        *y = x * scale * w;
    }
}

#[inline(always)]
fn rms_norm_rows_body<const FMA: bool>(y: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    let n = weight.len();
    for (y, x) in y.chunks_exact_mut(n).zip(x.chunks_exact(n)) {
        rms_norm_row::<FMA>(y, x, weight, eps);
    }
}

#[inline(always)]
fn silu_mul_body<const FMA: bool>(y: &mut [f32], x: &[f32], n: usize) {
    for (y, x) in y.chunks_exact_mut(n).zip(x.chunks_exact(2 * n)) {
        let (gate, up) = x.split_at(n);
        for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
            *y = g / (1.0 + exp::<FMA>(-g)) * u;
        }
    }
}

/// Rows of the key block that are summed apart, so that the additions do not wait for each other.
const CHAINS: usize = 4;

#[inline(always)]
fn page_scores_body<const FMA: bool>(scores: &mut [f32], stride: usize, q: &[f32], keys: &[f32], scale: f32) {
    let d = keys.len() / PAGE_TOKENS;
    for (group, q) in q.chunks_exact(d).enumerate() {
        let mut chains = [[0.0f32; PAGE_TOKENS]; CHAINS];
        let (q_blocks, key_blocks) = (q.chunks_exact(CHAINS), keys.chunks_exact(CHAINS * PAGE_TOKENS));
        let rest = q_blocks
            .remainder()
            .iter()
            .zip(key_blocks.remainder().chunks_exact(PAGE_TOKENS));
        for (q, keys) in rest {
            for (lane, k) in chains[0].iter_mut().zip(keys) {
                *lane = fma::<FMA>(*q, *k, *lane);
            }
        }
        for (q, keys) in q_blocks.zip(key_blocks) {
            for c in 0..CHAINS {
                let keys = &keys[c * PAGE_TOKENS..(c + 1) * PAGE_TOKENS];
                for s in 0..PAGE_TOKENS {
                    chains[c][s] = fma::<FMA>(q[c], keys[s], chains[c][s]);
                }
            }
        }
        let row = &mut scores[group * stride..group * stride + PAGE_TOKENS];
        for (s, score) in row.iter_mut().enumerate() {
            *score = ((chains[0][s] + chains[1][s]) + (chains[2][s] + chains[3][s])) * scale;
        }
    }
}

#[inline(always)]
fn softmax_body<const FMA: bool>(row: &mut [f32]) {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let mut largest = chunks
        .remainder()
        .iter()
        .copied()
        .fold(f32::NEG_INFINITY, f32::max);
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane = if *v > *lane { *v } else { *lane };
        }
    }
    largest = lanes.iter().copied().fold(largest, f32::max);
    let mut sums = [0.0f32; LANES];
    let mut chunks = row.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (sum, v) in sums.iter_mut().zip(chunk) {
            *v = exp::<FMA>(*v - largest);
            *sum += *v;
        }
    }
    let mut total = 0.0;
    for v in chunks.into_remainder() {
        *v = exp::<FMA>(*v - largest);
        total += *v;
    }
    total += sums.iter().sum::<f32>();
    let scale = 1.0 / total;
    for v in row {
        *v *= scale;
    }
}

#[inline(always)]
fn page_values_body<const FMA: bool>(
    out: &mut [f32],
    weights: &[f32],
    stride: usize,
    values: &[f32],
    count: usize,
    d: usize,
) {
    for (group, out) in out.chunks_exact_mut(d).enumerate() {
        let weights = &weights[group * stride..group * stride + count];
        // Columns of a block at a time, summed in registers over the tokens of the page.
        let mut column = 0;
        while column + COLUMNS <= d {
            let mut sums = [0.0f32; COLUMNS];
            for (w, value) in weights.iter().zip(values.chunks_exact(d)) {
                let value = &value[column..column + COLUMNS];
                for i in 0..COLUMNS {
                    sums[i] = fma::<FMA>(*w, value[i], sums[i]);
                }
            }
            for (o, sum) in out[column..column + COLUMNS].iter_mut().zip(sums) {
                *o += sum;
            }
            column += COLUMNS;
        }
        for (i, o) in out.iter_mut().enumerate().skip(column) {
            for (w, value) in weights.iter().zip(values.chunks_exact(d)) {
                *o = fma::<FMA>(*w, value[i], *o);
            }
        }
    }
}

/// Columns of the value block that are summed together.
const COLUMNS: usize = 32;

/// Normalises one head in place where there is a weight, and rotates its first `2·cos.len()` numbers;
/// `cos` and `sin` are the first half of the rotary row.
pub(super) fn norm_and_rotate(head: &mut [f32], weight: Option<&[f32]>, eps: f32, cos: &[f32], sin: &[f32]) {
    if let Some(weight) = weight {
        let mean = sum_of_squares::<false>(head) / head.len() as f32;
        let scale = 1.0 / (mean + eps).sqrt();
        for (x, w) in head.iter_mut().zip(weight) {
            *x = *x * scale * w;
        }
    }
    let half = cos.len();
    let (a, b) = head[..2 * half].split_at_mut(half);
    for i in 0..half {
        let (x, y) = (a[i], b[i]);
        a[i] = x * cos[i] - y * sin[i];
        b[i] = y * cos[i] + x * sin[i];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, seed: usize) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 37 + seed * 101) % 257) as f32 / 64.0 - 2.0)
            .collect()
    }

    #[test]
    fn exp_is_accurate_with_and_without_fma() {
        for i in -8700..=8800 {
            let x = i as f32 / 100.0;
            let want = f64::from(x).exp();
            for got in [exp::<true>(x), exp::<false>(x)] {
                assert!((f64::from(got) / want - 1.0).abs() < 3e-7, "{x}: {got} {want}");
            }
        }
        assert!(exp::<true>(f32::NEG_INFINITY) < 1e-37);
    }

    #[test]
    fn softmax_is_that_of_f64() {
        for n in [1, 5, 16, 33, 300] {
            let row = values(n, n);
            let mut got = row.clone();
            softmax(&mut got);
            let exps: Vec<f64> = row.iter().map(|v| f64::from(*v).exp()).collect();
            let total: f64 = exps.iter().sum();
            for (g, e) in got.iter().zip(exps) {
                assert!((f64::from(*g) - e / total).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn page_kernels_are_dot_products() {
        let (groups, stride, count) = (2, 32, 5);
        for d in [6, 20, 32, 35, 64] {
            let (q, keys, rows) = (
                values(groups * d, 1),
                values(d * PAGE_TOKENS, 2),
                values(PAGE_TOKENS * d, 3),
            );
            let mut scores = vec![0.0; groups * stride];
            page_scores(&mut scores, stride, &q, &keys, 0.5);
            let weights = values(groups * stride, 4);
            let mut out = vec![1.0; groups * d];
            page_values(&mut out, &weights, stride, &rows, count, d);
            for g in 0..groups {
                for s in 0..PAGE_TOKENS {
                    let want: f32 = (0..d).map(|i| q[g * d + i] * keys[i * PAGE_TOKENS + s]).sum();
                    assert!((scores[g * stride + s] - 0.5 * want).abs() < 1e-4);
                }
                for i in 0..d {
                    let want: f32 = (0..count)
                        .map(|s| weights[g * stride + s] * rows[s * d + i])
                        .sum();
                    assert!((out[g * d + i] - 1.0 - want).abs() < 1e-4);
                }
            }
        }
    }

    #[test]
    fn silu_is_that_of_f64() {
        let x = values(3 * 2 * 21, 9);
        let mut y = vec![0.0; 3 * 21];
        silu_mul(&mut y, &x, 21);
        for t in 0..3 {
            for i in 0..21 {
                let (g, u) = (f64::from(x[t * 42 + i]), f64::from(x[t * 42 + 21 + i]));
                assert!((f64::from(y[t * 21 + i]) - g / (1.0 + (-g).exp()) * u).abs() < 1e-5);
            }
        }
    }
}
