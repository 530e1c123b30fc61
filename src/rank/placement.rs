//! Where a rank computes: `DEVICE` and `MODEL_DTYPE` on the machine at hand.

use crate::{
    comm::local_rank,
    config::settings::{
        values::{DeviceName, ModelDtype},
        Settings,
    },
    model::net::{choose_device, ComputeType, Device, DeviceChoice},
};
use anyhow::Context;

/// Device and element type of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Of trainer and engine.
    pub device: Device,
    /// Element type of matrix products, where the device allows a choice.
    pub compute: ComputeType,
}

/// Chooses. Call it before any other work with tensors.
///
/// # Errors
/// The device that `DEVICE` asks for is not there; the error says what is missing.
pub fn placement(settings: &Settings) -> anyhow::Result<Placement> {
    let name = settings.model.device;
    let choice = match name {
        DeviceName::Auto => DeviceChoice::Auto,
        DeviceName::Cpu => DeviceChoice::Cpu,
        DeviceName::Cuda => DeviceChoice::Cuda,
    };
    let device = choose_device(choice, local_rank()).with_context(|| format!("DEVICE={name}"))?;
    Ok(on(device, settings.model.dtype))
}

fn on(device: Device, dtype: Option<ModelDtype>) -> Placement {
    let compute = match (dtype, device) {
        (Some(ModelDtype::F32), _) | (None, Device::Cpu) => ComputeType::F32,
        (Some(ModelDtype::Bf16), _) | (None, _) => ComputeType::Bf16,
    };
    Placement { device, compute }
}

impl Placement {
    /// One line for the log.
    pub fn describe(&self) -> String {
        let name = |device| match device {
            Device::Cpu => "the CPU".to_owned(),
            Device::Cuda(number) => format!("CUDA device {number}"),
            other => format!("{other:?}"),
        };
        let kind = match self.compute {
            ComputeType::F32 => "f32",
            ComputeType::Bf16 => "bf16",
        };
        format!("computing on {} in {kind}", name(self.device))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_follows_the_device() {
        let gpu = Device::Cuda(1);
        assert_eq!(on(Device::Cpu, None).compute, ComputeType::F32);
        assert_eq!(on(gpu, None).compute, ComputeType::Bf16);
        assert_eq!(on(gpu, Some(ModelDtype::F32)).compute, ComputeType::F32);
        assert_eq!(on(gpu, None).describe(), "computing on CUDA device 1 in bf16");
    }
}
