//! What needs a GPU. Every test is skipped, with a line that says why, where there is none.
//!
//! ```text
//! LD_LIBRARY_PATH=SITE/torch/lib:SITE/nvidia/cu13/lib cargo nextest run -p legorl --test gpu --no-capture
//! LD_LIBRARY_PATH=… mpirun -n N TEST-PROGRAM --exact TEST --nocapture
//! ```
//! SITE is the folder `site-packages` of a PyTorch 2.11 with CUDA, TEST-PROGRAM the program that cargo
//! built for the first line. The second line needs N GPUs, 2 or more, and is for one test of `collectives` or `ranks`
//! at a time: a process joins the other ranks once. Fixtures are read from tests/fixtures/models of the current
//! folder.

#[cfg(all(feature = "cuda", feature = "mpi"))]
mod collectives;
mod engine;
mod network;
#[cfg(all(feature = "cuda", feature = "mpi"))]
mod ranks;
mod trainer;

use legorl::model::net::{choose_device, Device, DeviceChoice};
use std::path::PathBuf;

/// The device of this process, or why the test is skipped.
fn gpu() -> Option<Device> {
    match choose_device(DeviceChoice::Cuda, legorl::comm::local_rank()) {
        Ok(device) => Some(device),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from("tests/fixtures/models").join(name)
}

/// Folders of all families.
const FAMILIES: [&str; 7] = [
    "llama",
    "qwen3",
    "qwen3_untied_bias",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
];

/// Token ids that every fixture's vocabulary holds.
fn ids(count: usize, seed: usize) -> Vec<i64> {
    (0..count)
        .map(|i| ((i * i * 7 + i * 13 + seed * 31) % 90 + 4) as i64)
        .collect()
}

/// Root mean square of the difference over the deviation of `want`.
fn spread(want: &tch::Tensor, got: &tch::Tensor) -> f64 {
    let wide = |t: &tch::Tensor| t.detach().to_device(Device::Cpu).to_kind(tch::Kind::Double);
    let (want, got) = (wide(want), wide(got));
    ((&want - got).square().mean(tch::Kind::Double).sqrt() / want.std(true)).double_value(&[])
}

/// Largest difference over the deviation of `want`.
fn distance(want: &tch::Tensor, got: &tch::Tensor) -> f64 {
    let wide = |t: &tch::Tensor| t.detach().to_device(Device::Cpu).to_kind(tch::Kind::Double);
    let (want, got) = (wide(want), wide(got));
    ((&want - got).abs().max() / want.std(true)).double_value(&[])
}
