//! Networks on libtorch: one differentiable forward that the trainer, the supervised start and the
//! tests share.
//!
//! Tensors are packed: a batch is one row of `T` tokens made of segments, and the [`PackedLayout`] says
//! where they start. Positions restart in every segment and attention never crosses a boundary, so a
//! packed batch gives what the segments give alone. A network is an embedding, a list of [`Block`]s and
//! a final norm; the head is applied by the caller, in chunks.
//!
//! Legend: T tokens, H hidden, V vocabulary, d head width, I MLP width.

mod attention;
mod layout;
mod policy;
mod qwen3;
#[cfg(test)]
mod reference_tests;
mod tensors;
#[cfg(test)]
mod tests;

pub(crate) use layout::rope_table;
pub use layout::PackedLayout;
pub use policy::{Block, Policy};
/// Where tensors live.
pub use tch::Device;
pub use tensors::{tensor_from_weight, weight_from_tensor};
