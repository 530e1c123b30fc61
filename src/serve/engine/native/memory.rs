//! Bytes that an engine reserves when it starts, and memory that may not be there.
//!
//! Cache and states are reserved as a whole. What cannot be had is an error that says which settings made it so
//! large, never an abort: [`NativeEngineConfig::memory`] is compared with the machine before anything is reserved, and
//! the reservation itself may fail.

use super::{
    compute::is_on_host, pages::PagePool, state_memory::slot_bytes, NativeEngineConfig, StartError,
    PAGE_TOKENS, SLOTS_A_SEAT,
};
use crate::{
    model::{
        hf::{MixerKind, ModelConfig},
        net::Device,
    },
    observe::memory,
};
use std::{alloc::Layout, cell::UnsafeCell};
use tch::Kind;

/// What an engine reserves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineMemory {
    /// Bytes of a page of the KV cache where the engine computes: keys and values of its tokens.
    pub cache_page: u64,
    /// Bytes of a page in main memory beside that: experts of its tokens, bookkeeping.
    pub host_page: u64,
    /// Bytes of the delta-net states where the engine computes.
    pub states: u64,
    /// Pages.
    pub pages: u64,
}

impl EngineMemory {
    /// Bytes of the cache where the engine computes, without its bookkeeping.
    pub fn cache(&self) -> u64 {
        self.pages.saturating_mul(self.cache_page)
    }
}

impl NativeEngineConfig {
    /// What an engine of this size reserves for a model.
    pub fn memory(&self, model: &ModelConfig) -> EngineMemory {
        let with = |kind| model.layers.iter().filter(|l| l.mixer == kind).count();
        let kind = if is_on_host(model, self.device) {
            Kind::Float
        } else {
            self.compute.kind_for(model)
        };
        let number = kind.elt_size_in_bytes();
        let token = with(MixerKind::FullAttention) * 2 * model.num_key_value_heads * model.head_dim * number;
        let experts = model.num_sparse_layers() * model.experts.map_or(0, |e| e.top_k) * size_of::<u16>();
        let seat = slot_bytes(model, kind).saturating_mul(SLOTS_A_SEAT as u64);
        EngineMemory {
            cache_page: (token * PAGE_TOKENS) as u64,
            host_page: (experts * PAGE_TOKENS + PagePool::PAGE_BYTES) as u64,
            states: seat.saturating_mul(self.max_num_seqs as u64),
            pages: (self.kv_cache_tokens / PAGE_TOKENS) as u64,
        }
    }

    /// Compares with the main memory of this machine. On a GPU the reservation itself tells.
    pub(super) fn check_memory(&self, model: &ModelConfig) -> Result<(), StartError> {
        match memory::total() {
            Some(total) => self.check_fits(&self.memory(model), total),
            None => Ok(()),
        }
    }

    fn check_fits(&self, needed: &EngineMemory, total: u64) -> Result<(), StartError> {
        let on_host = self.device == Device::Cpu;
        let (page, states) = if on_host {
            (needed.host_page + needed.cache_page, needed.states)
        } else {
            (needed.host_page, 0)
        };
        let bytes = needed.pages.saturating_mul(page).saturating_add(states);
        if bytes > total || needed.pages > u64::from(u32::MAX) {
            return Err(self.too_large(bytes, &format!("this machine has {total} bytes of memory")));
        }
        Ok(())
    }

    /// The error of a reservation that failed.
    pub(super) fn too_large(&self, bytes: u64, why: &str) -> StartError {
        StartError::Memory {
            bytes,
            cache_tokens: self.kv_cache_tokens,
            max_model_len: self.max_model_len,
            max_num_seqs: self.max_num_seqs,
            why: why.to_owned(),
        }
    }
}

/// Numbers for which zeroed memory is a value.
pub(super) trait Plain {}
impl Plain for f32 {}
impl Plain for u16 {}

/// So many bytes could not be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoMemory(pub u64);

/// Zeroed memory of so many numbers; the product of `sizes`. The system provides it page by page as it is used.
pub(super) fn zeroed<T: Plain>(sizes: &[usize]) -> Result<Box<[UnsafeCell<T>]>, NoMemory> {
    let bytes = sizes
        .iter()
        .fold(size_of::<T>() as u64, |n, size| n.saturating_mul(*size as u64));
    let count = sizes.iter().try_fold(1usize, |n, size| n.checked_mul(*size));
    let layout = count.and_then(|n| Some((n, Layout::array::<UnsafeCell<T>>(n).ok()?)));
    let Some((count, layout)) = layout else {
        return Err(NoMemory(bytes));
    };
    if layout.size() == 0 {
        return Ok(Box::new([]));
    }
    // SAFETY: the layout has a size.
    let start = unsafe { std::alloc::alloc_zeroed(layout) };
    if start.is_null() {
        return Err(NoMemory(bytes));
    }
    let slice = std::ptr::slice_from_raw_parts_mut(start.cast::<UnsafeCell<T>>(), count);
    // SAFETY: the global allocator gave it with the layout of this slice, and zeroes are numbers ([`Plain`]).
    Ok(unsafe { Box::from_raw(slice) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_cannot_be_had_is_an_error() {
        assert_eq!(zeroed::<f32>(&[3, 5]).unwrap().len(), 15);
        assert_eq!(zeroed::<u16>(&[3, 0]).unwrap().len(), 0);
        // More than an address space, and more than a number can count.
        assert_eq!(zeroed::<f32>(&[1 << 45]).unwrap_err(), NoMemory(1 << 47));
        assert_eq!(
            zeroed::<u16>(&[1 << 40, 1 << 40]).unwrap_err(),
            NoMemory(u64::MAX)
        );
    }

    /// The defaults of a run config (64 sequences of 200,000 tokens) on a small machine.
    #[test]
    fn a_cache_beyond_the_machine_names_its_settings_and_bytes() {
        let config = NativeEngineConfig {
            max_num_seqs: 64,
            max_model_len: 200_000,
            kv_cache_tokens: 64 * 200_000,
            ..NativeEngineConfig::default()
        };
        let model = ModelConfig::qwen3(256, 64, 128, 2, 4, 2, 16);
        let needed = config.memory(&model);
        // Two layers, keys and values, two heads of 16 numbers of 4 bytes.
        assert_eq!(needed.cache_page, 2 * 2 * 2 * 16 * 4 * PAGE_TOKENS as u64);
        assert_eq!(needed.cache(), 64 * 200_000 * 512);
        assert!(config.check_fits(&needed, 1 << 40).is_ok());
        let error = config.check_fits(&needed, 1 << 30).unwrap_err().to_string();
        for part in [
            "ENGINE_MAX_NUM_SEQS=64",
            "MAX_PROMPT + MAX_RESP",
            "200000",
            "1073741824 bytes",
            "ENGINE_KV_CACHE_TOKENS",
        ] {
            assert!(error.contains(part), "no `{part}` in {error}");
        }
    }
    /// A hybrid is computed in f64 where f32 is asked for; three of its four layers have a state.
    #[test]
    fn a_hybrid_takes_what_its_numbers_take() {
        use crate::model::net::ComputeType;
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/qwen3_5");
        let model = ModelConfig::from_dir(&folder).unwrap();
        let s = model.linear_attention.unwrap();
        let (state, inputs) = (
            s.num_value_heads * s.key_head_dim * s.value_head_dim,
            (s.conv_kernel - 1) * s.conv_dim(),
        );
        for (compute, number, of_state) in [(ComputeType::F32, 8, 8), (ComputeType::Bf16, 2, 4)] {
            let config = NativeEngineConfig {
                max_num_seqs: 5,
                compute,
                ..NativeEngineConfig::default()
            };
            let needed = config.memory(&model);
            let token = 2 * model.num_key_value_heads * model.head_dim * number;
            assert_eq!(needed.cache_page, (token * PAGE_TOKENS) as u64);
            let slot = 3 * (state * of_state + inputs * number);
            assert_eq!(needed.states, (5 * SLOTS_A_SEAT * slot) as u64);
        }
    }
}
