//! Networks on libtorch: one differentiable forward that the trainer, the supervised start and the
//! tests share.
//!
//! A family is one file ([`llama`], [`qwen3`], [`qwen3_moe`], [`qwen3_next`], [`qwen3_5`],
//! [`qwen3_5_moe`]) that puts a [`decoder`] layer together from shared pieces.
//!
//! Tensors are packed: a batch is one row of `T` tokens made of segments, and the [`PackedLayout`] says
//! where they start. Positions restart in every segment; attention, convolution and delta rule never cross
//! a boundary, so a packed batch gives what the segments give alone. A network is an embedding, a list of [`Block`]s and
//! a final norm; the head is applied by the caller, in chunks.
//!
//! Parameters are f32. The residual stream may be bf16 ([`ComputeType`]): then every matrix is rounded
//! when it is used, and what the families keep in f32 stays there. Where f32 is asked for, families with a
//! delta net compute in f64: every parameter is widened when it is used, nothing is rounded to f32 before
//! the gradients of parameters are.
//!
//! Legend: T tokens, H hidden, V vocabulary, d head width, I MLP width, E experts, k experts of a token.

mod attention;
mod decoder;
mod delta_net;
mod delta_rule;
#[cfg(test)]
mod delta_rule_tests;
mod device;
mod dispatcher;
mod exchange;
mod experts;
mod fused;
mod layout;
mod llama;
mod mlp;
mod norm;
mod parameters;
mod policy;
mod precision;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
#[cfg(test)]
mod reference_tests;
mod router;
#[cfg(test)]
mod router_tests;
mod tensors;
#[cfg(test)]
mod tests;
mod trace;

pub use device::{choose_device, DeviceChoice, DeviceError};
pub use exchange::{Exchange, LayerGroups, Tape};
pub(crate) use fused::{flash_attention, has_flash_attention};
pub use fused::{fused_adamw, AdamWStep, AdamWTensors};
pub(crate) use layout::rope_table;
pub use layout::{DeltaState, PackedLayout, Routing, TokenMemory};
pub use policy::{Block, Policy};
pub use precision::ComputeType;
/// Where tensors live.
pub use tch::Device;
pub use tensors::{tensor_from_weight, weight_from_tensor};
pub use trace::{greedy_without_cache, trace, PlainTensor, PlainValues};

/// CPU threads of libtorch on the calling thread; 0 takes the cores that the process may use.
pub fn set_threads(count: u32) {
    let cores = || std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    tch::set_num_threads(if count == 0 { cores() } else { count } as i32);
}
