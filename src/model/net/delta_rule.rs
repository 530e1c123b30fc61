//! The gated delta rule over packed segments, in chunks (Yang, Kautz, Hatamizadeh, 2025, "Gated Delta
//! Networks"; the chunked form is that of Yang et al., 2024, "Parallelizing Linear Transformers with the
//! Delta Rule").
//!
//! Per value head, with a state `S [dk,dv]` that is zero at the start of a segment. Query and key head i
//! serve the value heads i·r to (i+1)·r − 1, r = Hv/Hk; they come in as projected and convolved:
//!
//! ```text
//! q ← dk^-½ · q / √(Σq² + 1e-6);   k ← k / √(Σk² + 1e-6)
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
//!
//! A text that is computed piece by piece goes on from the state behind the piece before: pieces of one token
//! by the recurrence, all of them in one operation; longer ones by the chunked rule, whose first S is then not
//! zero.

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
    /// `[segments that are not empty]`: the segment of every first chunk.
    order: Tensor,
}

impl ChunkGrid {
    pub(super) fn new(segments: impl Iterator<Item = Range<i64>>, device: Device) -> Self {
        let numbered = (0..).zip(segments).filter(|(_, s)| !s.is_empty());
        let mut numbered: Vec<(i64, Range<i64>)> = numbered.collect();
        numbered.sort_by_key(|(_, s)| std::cmp::Reverse(s.end - s.start));
        let (order, segments): (Vec<i64>, Vec<Range<i64>>) = numbered.into_iter().unzip();
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
            order: tensor(&order),
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

/// How the pieces of a row are gone through: the first ones have one token each, the rest any number.
pub(super) struct PieceGrid {
    singles: i64,
    rest: Option<ChunkGrid>,
}

impl PieceGrid {
    pub(super) fn new(pieces: impl Iterator<Item = Range<i64>>, device: Device) -> Self {
        let pieces: Vec<Range<i64>> = pieces.collect();
        let singles = pieces.iter().take_while(|p| p.end - p.start == 1).count();
        let shift = singles as i64;
        let rest = pieces[singles..].iter().map(|p| p.start - shift..p.end - shift);
        Self {
            singles: shift,
            rest: (singles < pieces.len()).then(|| ChunkGrid::new(rest, device)),
        }
    }
}

/// What the rule reads of tokens: `q`, `k [T,Hv,dk]` of their lengths, `v [T,Hv,dv]`, `g` and `beta [T,Hv]`.
struct RuleInputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
}

impl RuleInputs {
    fn new(q: &Tensor, k: &Tensor, v: &Tensor, g: &Tensor, beta: &Tensor) -> Self {
        let groups = v.size()[1] / q.size()[1];
        let scale = (q.size()[2] as f64).powf(-0.5);
        let normalised = |x: &Tensor| {
            let x = wide(x);
            let norm = ((&x * &x).sum_dim_intlist(-1, true, None::<Kind>) + L2_EPS).rsqrt();
            let x = x * norm;
            if groups == 1 {
                x
            } else {
                x.repeat_interleave_self_int(groups, 1, None)
            }
        };
        Self {
            q: normalised(q) * scale,
            k: normalised(k),
            v: wide(v),
            g: g.shallow_clone(),
            beta: wide(beta),
        }
    }

    fn narrow(&self, start: i64, count: i64) -> Self {
        let part = |x: &Tensor| x.narrow(0, start, count);
        Self {
            q: part(&self.q),
            k: part(&self.k),
            v: part(&self.v),
            g: part(&self.g),
            beta: part(&self.beta),
        }
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
    chunked(&RuleInputs::new(q, k, v, g, beta), grid, None)
}

/// The same over pieces of texts. `state [pieces,Hv,dk,dv]` is that before the pieces and becomes that behind
/// them.
pub(super) fn gated_delta_rule_over_pieces(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    g: &Tensor,
    beta: &Tensor,
    grid: &PieceGrid,
    state: &mut Tensor,
) -> Tensor {
    let inputs = RuleInputs::new(q, k, v, g, beta);
    let Some(rest) = &grid.rest else {
        return recurrent(&inputs, state);
    };
    if grid.singles == 0 {
        return chunked(&inputs, rest, Some(state));
    }
    let (tokens, pieces) = (inputs.v.size()[0], state.size()[0]);
    let mut part = state.narrow(0, 0, grid.singles);
    let singles = recurrent(&inputs.narrow(0, grid.singles), &mut part);
    part = state.narrow(0, grid.singles, pieces - grid.singles);
    let inputs = inputs.narrow(grid.singles, tokens - grid.singles);
    Tensor::cat(&[singles, chunked(&inputs, rest, Some(&mut part))], 0)
}

/// One token of every sequence: `[n,Hv,dv]`; `state [n,Hv,dk,dv]` is overwritten.
fn recurrent(x: &RuleInputs, state: &mut Tensor) -> Tensor {
    let row = |t: &Tensor| t.unsqueeze(-2);
    let _ = state.g_mul_(&x.g.exp().unsqueeze(-1).unsqueeze(-1));
    let read = row(&x.k).matmul(state).squeeze_dim(-2);
    let update = (&x.v - read) * x.beta.unsqueeze(-1);
    let _ = state.addcmul_(&x.k.unsqueeze(-1), &row(&update));
    row(&x.q).matmul(state).squeeze_dim(-2)
}

/// The chunked rule: `[T,Hv,dv]`. A state `[segments,Hv,dk,dv]` is overwritten with that behind the segments;
/// without one it is zero before them.
fn chunked(x: &RuleInputs, grid: &ChunkGrid, kept: Option<&mut Tensor>) -> Tensor {
    let (q, k, v) = (grid.spread(&x.q), grid.spread(&x.k), grid.spread(&x.v));
    let beta = grid.spread(&x.beta).unsqueeze(-1);
    // [chunks,Hv,C]
    let sums = grid.spread(&x.g).cumsum(-1, None::<Kind>);

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
    let mut state = kept.as_ref().map(|kept| kept.index_select(0, &grid.order));
    let mut outputs = Vec::with_capacity(grid.active.len());
    // States behind the segments, the longest segments last.
    let mut ended = Vec::new();
    for (j, &count) in grid.active.iter().enumerate() {
        let next = grid.active.get(j + 1).copied().unwrap_or(0);
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
        if kept.is_some() && next < count {
            ended.push(new.narrow(0, next, count - next));
        }
        state = (next > 0).then_some(new);
    }
    if let Some(kept) = kept {
        ended.reverse();
        let _ = kept.index_copy_(0, &grid.order, &Tensor::cat(&ended, 0));
    }
    grid.gather(&Tensor::cat(&outputs, 0))
}
