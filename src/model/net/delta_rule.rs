//! The gated delta rule over packed segments, in chunks (Yang, Kautz, Hatamizadeh, 2025, "Gated Delta
//! Networks"; the chunked form is that of Yang et al., 2024, "Parallelizing Linear Transformers with the
//! Delta Rule").
//!
//! Per value head, with a state `S [dk,dv]` that is zero at the start of a segment:
//!
//! ```text
//! S ← e^{g_t}·S;   u_t = β_t·(v_t − Sᵀk_t);   S ← S + k_t u_tᵀ;   o_t = Sᵀ q_t
//! ```
//!
//! Chunked, rows are the C positions of a chunk, G the running sum of g within it, S the state before it:
//!
//! ```text
//! D_ij = e^{G_i − G_j} for i ≥ j, else 0
//! M = I + strict_lower( diag(β) K Kᵀ ∘ D )
//! U = M⁻¹ diag(β) V;   Y = M⁻¹ diag(β e^G) K             unit lower triangular solves, all chunks at once
//! N = U − Y S
//! O = diag(e^G) Q S + (Q Kᵀ ∘ D) N
//! S ← e^{G_C} S + (diag(e^{G_C − G}) K)ᵀ N
//! ```
//!
//! The last three lines run from chunk to chunk, for all segments side by side. A chunk that is not full
//! is padded with zeros, which leave the state alone. Everything here is f32 (f64 for an f64 network).

use super::precision::wide;
use std::ops::Range;
use tch::{Device, Kind, Tensor};

/// Tokens of a chunk at most: the solves grow with its square, the sequential part shrinks with it.
const CHUNK: i64 = 64;
/// Added to the squared norm of queries and keys.
const L2_EPS: f64 = 1e-6;

/// How the segments of a row are cut. Rows of the grid are ordered by the number of the chunk within its
/// segment, then by segment, longest segments first; so the segments that have a j-th chunk come first
/// among those that have a (j-1)-th.
pub(super) struct ChunkGrid {
    /// Tokens of a chunk.
    chunk: i64,
    /// Chunks in all, by their number within the segment.
    active: Vec<i64>,
    /// `[chunks·C]`: the token of every place; T for padding.
    places: Tensor,
    /// `[T]`: the place of every token.
    tokens: Tensor,
}

impl ChunkGrid {
    pub(super) fn new(segments: impl Iterator<Item = Range<i64>>, device: Device) -> Self {
        let mut segments: Vec<Range<i64>> = segments.filter(|s| !s.is_empty()).collect();
        segments.sort_by_key(|s| std::cmp::Reverse(s.end - s.start));
        let longest = segments.first().map_or(1, |s| s.end - s.start);
        let total: i64 = segments.iter().map(|s| s.end - s.start).sum();
        let chunk = CHUNK.min(longest);
        let (mut places, mut tokens) = (Vec::new(), vec![0i64; total as usize]);
        let mut active = Vec::new();
        for number in 0..(longest + chunk - 1) / chunk {
            let mut count = 0;
            for segment in &segments {
                let start = segment.start + number * chunk;
                if start >= segment.end {
                    break;
                }
                count += 1;
                for token in start..start + chunk {
                    if token < segment.end {
                        tokens[token as usize] = places.len() as i64;
                        places.push(token);
                    } else {
                        places.push(total);
                    }
                }
            }
            active.push(count);
        }
        let tensor = |values: &[i64]| Tensor::from_slice(values).to_device(device);
        Self {
            chunk,
            active,
            places: tensor(&places),
            tokens: tensor(&tokens),
        }
    }

    /// `[T,heads,…]` → `[chunks,heads,C,…]`, zeros in the padding.
    fn spread(&self, x: &Tensor) -> Tensor {
        let mut size = x.size();
        size[0] = 1;
        let padded = Tensor::cat(&[x, &Tensor::zeros(&size, (x.kind(), x.device()))], 0);
        size.splice(0..1, [-1, self.chunk]);
        padded
            .index_select(0, &self.places)
            .view(&size[..])
            .transpose(1, 2)
    }

    /// `[chunks,heads,C,d]` → `[T,heads,d]`.
    fn gather(&self, x: &Tensor) -> Tensor {
        let size = x.size();
        let rows = x.transpose(1, 2).reshape([size[0] * size[2], size[1], size[3]]);
        rows.index_select(0, &self.tokens)
    }
}

/// `q`, `k` `[T,Hk,dk]` not yet normalised, `v [T,Hv,dv]`, `g` (log of the decay, ≤ 0) and `beta`
/// `[T,Hv]` → `[T,Hv,dv]`. Key head i serves the value heads `i·Hv/Hk …`.
pub(super) fn gated_delta_rule(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    g: &Tensor,
    beta: &Tensor,
    grid: &ChunkGrid,
) -> Tensor {
    let groups = v.size()[1] / q.size()[1];
    let scale = (q.size()[2] as f64).powf(-0.5);
    let normalised = |x: &Tensor| {
        let x = wide(x);
        let norm = ((&x * &x).sum_dim_intlist(-1, true, None::<Kind>) + L2_EPS).rsqrt();
        (x * norm).repeat_interleave_self_int(groups, 1, None)
    };
    let q = grid.spread(&(normalised(q) * scale));
    let k = grid.spread(&normalised(k));
    let v = grid.spread(&wide(v));
    let beta = grid.spread(&wide(beta)).unsqueeze(-1);
    // [chunks,Hv,C]
    let sums = grid.spread(g).cumsum(-1, None::<Kind>);

    let c = grid.chunk;
    let ones = Tensor::ones([c, c], (Kind::Bool, v.device()));
    let differences = sums.unsqueeze(-1) - sums.unsqueeze(-2);
    // Masked before the exponential, which would overflow above the diagonal.
    let decay = differences.masked_fill(&ones.triu(1), f64::NEG_INFINITY).exp();
    let growth = sums.exp().unsqueeze(-1);
    let rest = (sums.narrow(-1, c - 1, 1) - &sums).exp().unsqueeze(-1);
    let whole = sums.narrow(-1, c - 1, 1).exp().unsqueeze(-1);

    let keys = k.transpose(-1, -2);
    let system = ((&beta * &k).matmul(&keys) * &decay).tril(-1);
    let right = Tensor::cat(&[&beta * &v, &beta * &growth * &k], -1);
    // `unitriangular`: the ones on the diagonal are implied.
    let solved = system.linalg_solve_triangular(&right, false, true, true);
    let (dk, dv) = (k.size()[3], v.size()[3]);
    let parts = solved.split_with_sizes([dv, dk], -1);
    let inner = q.matmul(&keys) * &decay;
    let queries = &growth * &q;
    let updates = (&rest * &k).transpose(-1, -2);

    let cut = |t: &Tensor| t.split_with_sizes(&grid.active[..], 0);
    let (u, y, inner) = (cut(&parts[0]), cut(&parts[1]), cut(&inner));
    let (queries, updates, whole) = (cut(&queries), cut(&updates), cut(&whole));
    let mut state: Option<Tensor> = None;
    let mut outputs = Vec::with_capacity(grid.active.len());
    for (j, &count) in grid.active.iter().enumerate() {
        let last = j + 1 == grid.active.len();
        let (new, output) = match state.take().map(|s| s.narrow(0, 0, count)) {
            // The state of a first chunk is zero.
            None => {
                outputs.push(inner[j].matmul(&u[j]));
                (updates[j].matmul(&u[j]), None)
            }
            Some(before) => {
                let n = &u[j] - y[j].matmul(&before);
                let output = queries[j].matmul(&before) + inner[j].matmul(&n);
                let new = &whole[j] * &before + updates[j].matmul(&n);
                (new, Some(output))
            }
        };
        outputs.extend(output);
        state = (!last).then_some(new);
    }
    grid.gather(&Tensor::cat(&outputs, 0))
}
