//! Between bytes of a checkpoint and libtorch tensors.

use crate::base::{DType, WeightError, WeightTensor};
use bytes::Bytes;
use rand::{Rng, SeedableRng};
use tch::{Device, Kind, Tensor};

fn bad(name: &str, problem: String) -> WeightError {
    WeightError::Tensor {
        name: name.to_string(),
        problem,
    }
}

/// An f32 tensor on `device` with the values of `weight`, whose shape must be `shape`.
pub fn tensor_from_weight(
    weight: &WeightTensor,
    shape: &[i64],
    device: Device,
) -> Result<Tensor, WeightError> {
    let got: Vec<i64> = weight.shape.iter().map(|n| *n as i64).collect();
    if got != shape {
        return Err(bad(
            &weight.name,
            format!("shape {got:?} arrived, shape {shape:?} is wanted"),
        ));
    }
    let numel: usize = weight.shape.iter().product();
    if weight.data.len() != numel * weight.dtype.size_bytes() {
        let problem = format!("{} bytes do not hold shape {got:?}", weight.data.len());
        return Err(bad(&weight.name, problem));
    }
    let kind = match weight.dtype {
        DType::F32 => Kind::Float,
        DType::Bf16 => Kind::BFloat16,
    };
    let tensor = Tensor::f_from_data_size(&weight.data, shape, kind)
        .map_err(|e| bad(&weight.name, format!("libtorch: {e}")))?;
    // Moved before it is widened: half the bytes.
    Ok(tensor.to_device(device).to_kind(Kind::Float))
}

/// The values of a tensor as f32 bytes under its checkpoint name.
pub fn weight_from_tensor(name: &str, tensor: &Tensor) -> WeightTensor {
    let flat = tensor
        .detach()
        .to_device(Device::Cpu)
        .to_kind(Kind::Float)
        .contiguous();
    let numel = flat.numel();
    let mut data = vec![0u8; numel * DType::F32.size_bytes()];
    flat.copy_data_u8(&mut data, numel);
    WeightTensor {
        name: name.to_string(),
        dtype: DType::F32,
        shape: tensor.size().iter().map(|n| *n as usize).collect(),
        data: Bytes::from(data),
    }
}

/// A stream of random numbers that depends on its seed alone, unlike torch's global generator.
pub(super) struct RandomStream(rand_chacha::ChaCha12Rng);

impl RandomStream {
    pub(super) fn new(seed: i64) -> Self {
        Self(rand_chacha::ChaCha12Rng::seed_from_u64(seed as u64))
    }

    /// A CPU tensor of deviates with this standard deviation (Box and Muller, 1958).
    pub(super) fn normal(&mut self, shape: &[i64], deviation: f64) -> Tensor {
        let numel = shape.iter().product::<i64>() as usize;
        let mut values = Vec::with_capacity(numel + 1);
        while values.len() < numel {
            // 1 - u lies in (0, 1], so the logarithm is finite.
            let radius = (-2.0 * (1.0 - self.0.random::<f64>()).ln()).sqrt() * deviation;
            let angle = std::f64::consts::TAU * self.0.random::<f64>();
            values.push((radius * angle.cos()) as f32);
            values.push((radius * angle.sin()) as f32);
        }
        Tensor::from_slice(&values[..numel]).view(shape)
    }

    /// A CPU tensor of numbers evenly spread over `[low, high)`.
    pub(super) fn uniform(&mut self, shape: &[i64], low: f64, high: f64) -> Tensor {
        let numel = shape.iter().product::<i64>() as usize;
        let values: Vec<f32> = (0..numel)
            .map(|_| (low + (high - low) * self.0.random::<f64>()) as f32)
            .collect();
        Tensor::from_slice(&values).view(shape)
    }
}
