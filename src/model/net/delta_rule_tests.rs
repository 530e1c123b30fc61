//! The chunked rule against its recurrence, written token by token in f64.

use super::delta_rule::{gated_delta_rule, ChunkGrid};
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
            state = state * g.get(t).exp().view([-1, 1, 1]);
            let read = (&state * &k).sum_dim_intlist(1, false, None::<Kind>);
            let update = (x.v.get(t) - read) * beta.get(t).unsqueeze(-1);
            state = state + k * update.unsqueeze(1);
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
