//! Collectives by NCCL against those by messages, one process a GPU. Runs under `mpirun -n 2`.

use super::gpu;
use legorl::comm::{group, launch_world, nccl_group, Collectives, Element, LaunchKind, Memory, Tag};
use std::{sync::Arc, time::Duration};
use tch::{Device, Kind, Tensor};

const SOON: Duration = Duration::from_secs(60);

fn memory(tensor: &Tensor) -> Memory {
    Memory {
        address: tensor.data_ptr(),
        count: tensor.numel(),
        element: match tensor.kind() {
            Kind::Float => Element::F32,
            Kind::Double => Element::F64,
            Kind::BFloat16 => Element::Bf16,
            Kind::Int64 => Element::I64,
            other => panic!("{other:?}"),
        },
    }
}

/// Results of all operations with this rank's numbers, computed where `device` says.
fn results(on: &dyn Collectives, device: Device, kind: Kind) -> Vec<Tensor> {
    let (size, place) = (on.size() as i64, on.place() as i64);
    let wave = |count: i64, shift: f64| {
        let steps = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.37 + shift;
        let wave = steps.sin() * 8.0;
        (if kind == Kind::Int64 { wave * 100.0 } else { wave })
            .to_kind(kind)
            .to_device(device)
    };
    let empty = |count: i64| Tensor::zeros([count], (kind, device));
    let n = 1_000_003;
    let own = wave(n, place as f64);
    let gathered = empty(n * size);
    let whole = wave(4096 * size, 10.0 + place as f64);
    let part = empty(4096);
    // To rank p go 100·(p+1) numbers; rank 0 gets none of the last rank's.
    let count = |from: i64, to: i64| {
        if from == size - 1 && to == 0 {
            0
        } else {
            (100 * (to + 1)) as usize
        }
    };
    let out: Vec<usize> = (0..size).map(|to| count(place, to)).collect();
    let into: Vec<usize> = (0..size).map(|from| count(from, place)).collect();
    let sent = wave(out.iter().sum::<usize>() as i64, 20.0 + place as f64);
    let received = empty(into.iter().sum::<usize>() as i64);
    let summed = wave(77, 30.0 + place as f64);
    // SAFETY: all tensors live until the handles were waited for.
    let handles = unsafe {
        [
            on.all_gather("gather", memory(&own), memory(&gathered)),
            on.reduce_scatter("scatter", memory(&whole), memory(&part)),
            on.all_to_all("exchange", memory(&sent), &out, memory(&received), &into),
            on.all_reduce("sum", memory(&summed)),
        ]
    };
    for handle in handles {
        handle.unwrap().wait().unwrap();
    }
    [gathered, part, received, summed]
        .map(|t| t.to_device(Device::Cpu))
        .into()
}

#[test]
fn nccl_gives_what_messages_give() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(number) = device else {
        unreachable!("gpu() gives CUDA devices")
    };
    let world = launch_world().unwrap();
    if world.kind == LaunchKind::Single {
        println!("one rank alone");
    }
    let members: Vec<u32> = (0..world.comm.size()).collect();
    let host: Arc<dyn Collectives> = group(world.comm.clone(), &members, Tag::group(0), SOON).unwrap();
    let there = nccl_group(host.as_ref(), number, SOON).unwrap();
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Int64] {
        let want = results(host.as_ref(), Device::Cpu, kind);
        let got = results(there.as_ref(), device, kind);
        for (name, (want, got)) in ["gather", "scatter", "exchange", "sum"]
            .iter()
            .zip(want.iter().zip(&got))
        {
            assert_eq!(want.size(), got.size(), "{name} {kind:?}");
            // A rank alone exchanges nothing.
            if want.numel() == 0 {
                continue;
            }
            let gap = (want - got).abs().max().double_value(&[]);
            // Only sums of more than two numbers may round in another order; bf16 rounds each sum.
            let bound = match kind {
                Kind::Float => 1e-5,
                Kind::BFloat16 => 0.07,
                _ => 1e-12,
            };
            assert!(gap <= bound, "{name} {kind:?}: {gap}");
        }
        println!("rank {} of {}: {kind:?} agrees", host.place(), host.size());
    }
    // Bytes a second of the gather that sharded parameters need.
    let own = Tensor::ones([64 << 20], (Kind::BFloat16, device));
    let all = Tensor::zeros([(64 << 20) * host.size() as i64], (Kind::BFloat16, device));
    let mut begin = std::time::Instant::now();
    for round in 0..6 {
        if round == 1 {
            tch::Cuda::synchronize(number as i64);
            begin = std::time::Instant::now();
        }
        // SAFETY: both live until the device is done.
        unsafe { there.all_gather("speed", memory(&own), memory(&all)) }
            .unwrap()
            .wait()
            .unwrap();
    }
    tch::Cuda::synchronize(number as i64);
    let seconds = begin.elapsed().as_secs_f64() / 5.0;
    if host.place() == 0 {
        let bytes = (128 << 20) as f64 * (host.size() - 1) as f64;
        println!(
            "all-gather of 128 MiB a rank: {:.2} ms, {:.0} GB/s from others",
            1e3 * seconds,
            bytes / seconds / 1e9
        );
    }
    assert_eq!(all.sum(Kind::Double).double_value(&[]), all.numel() as f64);
    drop(there);
    world.shutdown().unwrap();
}
