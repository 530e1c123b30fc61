//! Routing replay (R3): from the rows of a sequence to what the routers of a packed row take.
//!
//! Rows count from the first token of their sequence, and the packed row is its sequences one behind the other:
//! row `t` of a sequence that begins at `s` is that of token `s + t`, so nothing can shift them.

use super::samples::Samples;
use crate::base::{RoutingShape, SequenceRouting, TokenSequence};
use tch::{Device, Tensor};

/// The rows of a sequence, readable without errors; `None` where nothing is replayed or was recorded. The text
/// of an error says what does not fit.
pub(super) fn rows(
    sequence: &TokenSequence,
    replay: Option<RoutingShape>,
) -> Result<Option<SequenceRouting>, String> {
    let (Some(shape), Some(routing)) = (replay, &sequence.routing) else {
        return Ok(None);
    };
    if routing.shape != shape {
        return Err(format!(
            "its experts were recorded for {}, and the policy has {shape}",
            routing.shape
        ));
    }
    let loaded = routing.loaded();
    Ok(Some(
        loaded.map_err(|e| format!("its experts cannot be read: {e}"))?,
    ))
}

/// `[T,k]` i16 by sparse layer of the sequences in a packed row of `row_tokens`, -1 for tokens without a row
/// and for padding at the end; `None` if none of them has any.
pub(super) fn experts(
    samples: &Samples,
    indices: &[usize],
    row_tokens: i64,
    device: Device,
) -> Option<Vec<Tensor>> {
    let members = || indices.iter().map(|&i| &samples.sequences[i]);
    let shape = members().find_map(|s| s.routing.as_ref())?.shape;
    let mut all: Vec<i16> = Vec::new();
    for sample in members() {
        let tokens = sample.ids.len();
        match &sample.routing {
            // Rows in memory inside a checked range: reading them cannot fail.
            Some(routing) => all.extend(routing.dense(tokens).unwrap_or_else(|e| {
                unreachable!("rows were checked and loaded when the batch was prepared: {e}")
            })),
            None => all.resize(all.len() + tokens * shape.width() as usize, -1),
        }
    }
    all.resize(row_tokens as usize * shape.width() as usize, -1);
    let sizes = [-1, i64::from(shape.layers), i64::from(shape.top_k)];
    let rows = Tensor::from_slice(&all).view(sizes).to_device(device);
    Some((0..sizes[1]).map(|layer| rows.select(1, layer)).collect())
}

/// Tokens with a row, and tokens that could have one: the last token of a sequence is never computed by the
/// engine, and nothing depends on its experts.
pub(super) fn coverage(samples: &Samples) -> (usize, usize) {
    samples.sequences.iter().fold((0, 0), |(recorded, all), sample| {
        let rows = sample.routing.as_ref().map_or(0, SequenceRouting::recorded);
        (recorded + rows, all + sample.ids.len() - 1)
    })
}
