//! Where a rank computes: `DEVICE` and `MODEL_DTYPE` on the machine at hand.

use crate::{
    comm::local_rank,
    config::settings::{
        values::{DeviceName, ModelDtype},
        Settings,
    },
    model::{
        hf::ModelConfig,
        net::{choose_device, ComputeType, Device, DeviceChoice},
    },
};
use anyhow::Context;

/// Devices and element type of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Of the trainer.
    pub trainer: Device,
    /// Of the engine: the trainer's, but the CPU for families with a delta net.
    pub engine: Device,
    /// Element type of matrix products, where the device allows a choice.
    pub compute: ComputeType,
}

/// Chooses. Call it before any other work with tensors.
///
/// # Errors
/// The device that `DEVICE` asks for is not there; the error says what is missing.
pub fn placement(settings: &Settings, model: &ModelConfig) -> anyhow::Result<Placement> {
    let name = settings.model.device;
    let choice = match name {
        DeviceName::Auto => DeviceChoice::Auto,
        DeviceName::Cpu => DeviceChoice::Cpu,
        DeviceName::Cuda => DeviceChoice::Cuda,
    };
    let device = choose_device(choice, local_rank()).with_context(|| format!("DEVICE={name}"))?;
    Ok(on(device, settings.model.dtype, model.model_type.is_hybrid()))
}

fn on(device: Device, dtype: Option<ModelDtype>, has_delta_net: bool) -> Placement {
    let compute = match (dtype, device) {
        (Some(ModelDtype::F32), _) | (None, Device::Cpu) => ComputeType::F32,
        (Some(ModelDtype::Bf16), _) | (None, _) => ComputeType::Bf16,
    };
    let engine = if has_delta_net { Device::Cpu } else { device };
    Placement {
        trainer: device,
        engine,
        compute,
    }
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
        if self.engine == self.trainer {
            format!("computing on {} in {kind}", name(self.trainer))
        } else {
            format!(
                "training on {} in {kind}; the engine serves families with a delta net on {} in f32",
                name(self.trainer),
                name(self.engine)
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_follows_the_device_and_delta_nets_are_served_by_the_host() {
        let gpu = Device::Cuda(1);
        assert_eq!(on(Device::Cpu, None, false).compute, ComputeType::F32);
        assert_eq!(on(gpu, None, false).compute, ComputeType::Bf16);
        assert_eq!(on(gpu, Some(ModelDtype::F32), false).compute, ComputeType::F32);
        assert_eq!(
            on(gpu, None, false).describe(),
            "computing on CUDA device 1 in bf16"
        );
        let hybrid = on(gpu, None, true);
        assert_eq!((hybrid.trainer, hybrid.engine), (gpu, Device::Cpu));
        assert!(
            hybrid.describe().contains("delta net on the CPU"),
            "{}",
            hybrid.describe()
        );
    }
}
