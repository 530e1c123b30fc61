//! Causal attention within the segments of a packed row.

use super::PackedLayout;
use tch::Tensor;

/// `q [T,nq,d]`, `k` and `v [T,nkv,d]` → `[T, nq*d]`. Query head h reads key head `h / (nq/nkv)`.
pub(super) fn packed_attention(q: &Tensor, k: &Tensor, v: &Tensor, layout: &PackedLayout) -> Tensor {
    let (tokens, query_heads) = (q.size()[0], q.size()[1]);
    let groups = query_heads / k.size()[1];
    let widen = |t: &Tensor| {
        if groups == 1 {
            t.shallow_clone()
        } else {
            t.repeat_interleave_self_int(groups, 1, None)
        }
    };
    // [1, heads, T, d]: strides suffice, the kernel copies nothing.
    let row = |t: &Tensor| t.transpose(0, 1).unsqueeze(0);
    let (q, k, v) = (row(q), row(&widen(k)), row(&widen(v)));
    let mut parts = Vec::new();
    for segment in layout.segments() {
        let (start, length) = (segment.start, segment.end - segment.start);
        if length == 0 {
            continue;
        }
        let cut = |t: &Tensor| t.narrow(2, start, length);
        parts.push(Tensor::scaled_dot_product_attention(
            &cut(&q),
            &cut(&k),
            &cut(&v),
            None::<Tensor>,
            0.0,
            true,
            None,
            false,
        ));
    }
    let joined = Tensor::cat(&parts, 2);
    joined.squeeze_dim(0).transpose(0, 1).reshape([tokens, -1])
}
