//! Logits of packed segments on the GPU against the CPU.

use super::{distance, fixture, gpu, ids, spread, FAMILIES};
use legorl::model::net::{ComputeType, Device, PackedLayout, Policy};
use tch::{no_grad, Kind, Tensor};

fn logits(name: &str, device: Device, compute: ComputeType) -> Tensor {
    let policy = Policy::load(&fixture(name), device)
        .unwrap()
        .with_compute_type(compute);
    let lengths = [70, 1, 33];
    let ids = Tensor::from_slice(&ids(lengths.iter().sum(), 3)).to_device(device);
    let layout = PackedLayout::new(&lengths, device);
    no_grad(|| policy.logits(&policy.forward_hidden(&ids, &layout)))
}

#[test]
fn every_family_gives_the_logits_of_the_cpu() {
    let Some(device) = gpu() else { return };
    for name in FAMILIES {
        let want = logits(name, Device::Cpu, ComputeType::F32);
        let wide = distance(&want, &logits(name, device, ComputeType::F32));
        let narrow = spread(&want, &logits(name, device, ComputeType::Bf16));
        let on_host = spread(&want, &logits(name, Device::Cpu, ComputeType::Bf16));
        println!("{name:20} f32 {wide:.1e}, bf16 {narrow:.1e} (on the CPU {on_host:.1e})");
        // Families with a delta net compute in f64.
        let bound = match want.kind() {
            Kind::Double => 1e-11,
            _ => 1e-4,
        };
        assert!(wide <= bound, "{name}: {wide}");
        // Rounding to bf16 does the same there as on the CPU, whatever it does to a network.
        assert!(narrow <= 1.5 * on_host + 0.05, "{name}: {narrow}");
    }
}
