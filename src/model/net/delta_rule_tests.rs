//! The chunked rule against its recurrence, written token by token in f64.

use super::delta_rule::{gated_delta_rule, gated_delta_rule_over_pieces, ChunkGrid, PieceGrid};
use tch::{no_grad, Device, Kind, Tensor};

const KEY_HEADS: i64 = 2;
const VALUE_HEADS: i64 = 4;
const KEY_DIM: i64 = 5;
const VALUE_DIM: i64 = 7;

struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
}

fn inputs(tokens: i64, kind: Kind) -> Inputs {
    tch::set_num_threads(1);
    // Sines of distinct phases: a stream that needs no global generator.
    let wave = |shape: &[i64], phase: f64| {
        let n = shape.iter().product::<i64>();
        let steps = Tensor::arange(n, (Kind::Double, Device::Cpu));
        ((&steps * &steps * 0.37 + steps * 1.7 + phase).sin() * 1.3)
            .view(shape)
            .to_kind(kind)
            .set_requires_grad(true)
    };
    Inputs {
        q: wave(&[tokens, KEY_HEADS, KEY_DIM], 0.1),
        k: wave(&[tokens, KEY_HEADS, KEY_DIM], 0.2),
        v: wave(&[tokens, VALUE_HEADS, VALUE_DIM], 0.3),
        g: wave(&[tokens, VALUE_HEADS], 0.4),
        beta: wave(&[tokens, VALUE_HEADS], 0.5),
    }
}

fn chunked(x: &Inputs, lengths: &[i64]) -> Tensor {
    let mut at = 0;
    let segments: Vec<_> = lengths
        .iter()
        .map(|n| {
            at += n;
            at - n..at
        })
        .collect();
    let grid = ChunkGrid::new(segments.into_iter(), Device::Cpu);
    let (g, beta) = (-x.g.abs() - 0.01, x.beta.sigmoid());
    gated_delta_rule(&x.q, &x.k, &x.v, &g, &beta, &grid)
}

fn recurrent(x: &Inputs, lengths: &[i64]) -> Tensor {
    let unit = |t: &Tensor| t / ((t * t).sum_dim_intlist(-1, true, None::<Kind>) + 1e-6).sqrt();
    let groups = VALUE_HEADS / KEY_HEADS;
    let widen = |t: Tensor| {
        let index: Vec<i64> = (0..VALUE_HEADS).map(|h| h / groups).collect();
        t.index_select(1, &Tensor::from_slice(&index))
    };
    let (q, k) = (widen(unit(&x.q)) / (KEY_DIM as f64).sqrt(), widen(unit(&x.k)));
    let (g, beta) = (-x.g.abs() - 0.01, x.beta.sigmoid());
    let mut rows = Vec::new();
    let mut t = 0;
    for length in lengths {
        let mut state = Tensor::zeros([VALUE_HEADS, KEY_DIM, VALUE_DIM], (x.v.kind(), Device::Cpu));
        for _ in 0..*length {
            let (k, q) = (k.get(t).unsqueeze(-1), q.get(t).unsqueeze(1));
            state = &state * g.get(t).exp().view([-1, 1, 1]);
            let read = (&state * &k).sum_dim_intlist(1, false, None::<Kind>);
            let update = (x.v.get(t) - read) * beta.get(t).unsqueeze(-1);
            state = &state + k * update.unsqueeze(1);
            rows.push(q.matmul(&state).squeeze_dim(1));
            t += 1;
        }
    }
    Tensor::stack(&rows, 0)
}

#[test]
fn chunks_give_what_the_recurrence_gives() {
    // More than two chunks, exactly one and two, one token, nothing, one chunk and a token.
    for lengths in [vec![150, 64, 1, 0, 128, 65], vec![3, 2], vec![1], vec![200]] {
        let tokens = lengths.iter().sum();
        for (kind, limit) in [(Kind::Double, 1e-10), (Kind::Float, 1e-4)] {
            let x = inputs(tokens, kind);
            let (ours, want) = no_grad(|| (chunked(&x, &lengths), recurrent(&x, &lengths)));
            let gap = (&ours - &want).abs().max().double_value(&[]) / want.std(true).double_value(&[]);
            assert!(gap < limit, "{lengths:?}, {kind:?}: {gap}");
        }
    }
}

#[test]
fn gradients_are_those_of_the_recurrence() {
    let lengths = [70, 5, 1, 64];
    let gradients = |rule: &dyn Fn(&Inputs, &[i64]) -> Tensor| {
        let x = inputs(140, Kind::Double);
        let wanted = [&x.q, &x.k, &x.v, &x.g, &x.beta].map(Tensor::shallow_clone);
        let output = rule(&x, &lengths);
        Tensor::run_backward(&[output.sin().sum(None::<Kind>)], &wanted, false, false)
    };
    for (name, (ours, want)) in ["q", "k", "v", "g", "beta"]
        .iter()
        .zip(gradients(&chunked).iter().zip(&gradients(&recurrent)))
    {
        let gap = (ours - want).norm().double_value(&[]) / want.norm().double_value(&[]);
        assert!(gap < 1e-10, "{name}: {gap}");
    }
}

/// Three texts in rounds of pieces, as an engine computes them: every cut of `cuts` is one text's pieces.
fn in_pieces(x: &Inputs, cuts: &[Vec<i64>]) -> Tensor {
    let starts: Vec<i64> = cuts
        .iter()
        .scan(0, |at, pieces| {
            let start = *at;
            *at += pieces.iter().sum::<i64>();
            Some(start)
        })
        .collect();
    let (g, beta) = (-x.g.abs() - 0.01, x.beta.sigmoid());
    let mut state = Tensor::zeros(
        [cuts.len() as i64, VALUE_HEADS, KEY_DIM, VALUE_DIM],
        (x.v.kind(), Device::Cpu),
    );
    let mut output = x.v.zeros_like();
    let mut done = vec![0; cuts.len()];
    for round in 0..cuts.iter().map(Vec::len).max().unwrap() {
        // Pieces of one token first; texts that have ended take no part.
        let mut part: Vec<(usize, i64)> = (0..cuts.len())
            .filter_map(|text| Some((text, *cuts[text].get(round)?)))
            .collect();
        part.sort_by_key(|(_, length)| *length > 1);
        let mut rows = Vec::new();
        let mut pieces = Vec::new();
        for (text, length) in &part {
            let from = starts[*text] + done[*text];
            pieces.push(rows.len() as i64..rows.len() as i64 + length);
            rows.extend(from..from + length);
            done[*text] += length;
        }
        let (rows, texts) = (
            Tensor::from_slice(&rows),
            Tensor::from_slice(&part.iter().map(|(text, _)| *text as i64).collect::<Vec<_>>()),
        );
        let of = |t: &Tensor| t.index_select(0, &rows);
        let mut here = state.index_select(0, &texts);
        let grid = PieceGrid::new(pieces.into_iter(), Device::Cpu);
        let out = gated_delta_rule_over_pieces(
            &of(&x.q),
            &of(&x.k),
            &of(&x.v),
            &of(&g),
            &of(&beta),
            &grid,
            &mut here,
        );
        let _ = state.index_copy_(0, &texts, &here);
        let _ = output.index_copy_(0, &rows, &out);
    }
    output
}

#[test]
fn any_cut_into_pieces_gives_the_whole() {
    let lengths = [150, 64, 131];
    let x = inputs(lengths.iter().sum(), Kind::Double);
    let cuts = [
        // Token by token: the recurrence alone.
        lengths.map(|n| vec![1; n as usize]),
        // In one piece: the chunks alone.
        lengths.map(|n| vec![n]),
        // Mixed: prompts beside decoding, several pieces of one prompt, pieces around the size of a chunk.
        [vec![64, 1, 65, 1, 1, 18], vec![1, 1, 60, 2], vec![130, 1]],
        [vec![3, 7, 140], vec![63, 1], vec![1, 128, 1, 1]],
    ];
    no_grad(|| {
        let want = recurrent(&x, &lengths);
        let deviation = want.std(true).double_value(&[]);
        for cuts in cuts {
            let gap = (in_pieces(&x, &cuts) - &want).abs().max().double_value(&[]) / deviation;
            println!("{gap:.1e}");
            assert!(gap < 1e-12, "{cuts:?}: {gap}");
        }
    });
}
