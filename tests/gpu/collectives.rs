//! Collectives by NCCL against those by messages, one process a GPU. Runs under `mpirun -n 2` or more.

use super::gpu;
use legorl::comm::{
    group, launch_world, nccl_group, Collectives, CommError, Element, LaunchKind, Memory, Tag, World,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tch::{Device, Kind, Tensor};

const SOON: Duration = Duration::from_secs(60);

fn memory(tensor: &Tensor) -> Memory {
    Memory {
        address: tensor.data_ptr(),
        count: tensor.numel(),
        element: match tensor.kind() {
            Kind::Uint8 => Element::U8,
            Kind::Float => Element::F32,
            Kind::Double => Element::F64,
            Kind::BFloat16 => Element::Bf16,
            Kind::Int64 => Element::I64,
            other => panic!("{other:?}"),
        },
    }
}

/// One group on the host and on the devices.
struct Both {
    world: World,
    host: Arc<dyn Collectives>,
    there: Arc<dyn Collectives>,
    number: usize,
    device: Device,
}

impl Both {
    /// All ranks; `None`, with a line that says why, without a GPU.
    fn start(limit: Duration) -> Option<Self> {
        let device = gpu()?;
        let Device::Cuda(number) = device else {
            unreachable!("gpu() gives CUDA devices")
        };
        let world = launch_world().unwrap();
        if world.kind == LaunchKind::Single {
            println!("one rank alone");
        }
        let members: Vec<u32> = (0..world.comm.size()).collect();
        let host = group(world.comm.clone(), &members, Tag::group(0), SOON).unwrap();
        let comm = world.comm.clone();
        let there = nccl_group(comm, host.as_ref(), Tag::notes(0), number, limit).unwrap();
        Some(Self {
            world,
            host,
            there,
            number,
            device,
        })
    }

    fn end(self) {
        drop((self.host, self.there));
        self.world.shutdown().unwrap();
    }
}

/// Results of all operations with this rank's numbers, `n` of them where all have as many, computed where `device`
/// says. All memory begins one number behind an aligned address.
fn results(on: &dyn Collectives, device: Device, kind: Kind, n: i64) -> Vec<Tensor> {
    let (size, place) = (on.size() as i64, on.place() as i64);
    let wave = |count: i64, shift: f64| {
        let steps = Tensor::arange(count + 1, (Kind::Double, Device::Cpu)) * 0.37 + shift;
        let wave = (steps.sin() + 1.0) * 8.0;
        let is_whole = matches!(kind, Kind::Int64 | Kind::Uint8);
        let wave = (if is_whole { wave * 15.0 } else { wave })
            .to_kind(kind)
            .to_device(device);
        wave.narrow(0, 1, count)
    };
    let empty = |count: i64| Tensor::zeros([count + 1], (kind, device)).narrow(0, 1, count);
    let own = wave(n, place as f64);
    let gathered = empty(n * size);
    let whole = wave(n * size, 10.0 + place as f64);
    let part = empty(n);
    // To rank p go n·(p+1) + p numbers; rank 0 gets none of the last rank's.
    let count = |from: i64, to: i64| {
        if from == size - 1 && to == 0 {
            0
        } else {
            (n * (to + 1) + to) as usize
        }
    };
    let out: Vec<usize> = (0..size).map(|to| count(place, to)).collect();
    let into: Vec<usize> = (0..size).map(|from| count(from, place)).collect();
    let sent = wave(out.iter().sum::<usize>() as i64, 20.0 + place as f64);
    let received = empty(into.iter().sum::<usize>() as i64);
    let summed = wave(n, 30.0 + place as f64);
    // SAFETY: all tensors live until the handles were waited for.
    let mut handles = unsafe {
        vec![
            on.all_gather("gather", memory(&own), memory(&gathered)),
            on.all_to_all("exchange", memory(&sent), &out, memory(&received), &into),
        ]
    };
    // Bytes are moved and never summed.
    if kind != Kind::Uint8 {
        // SAFETY: as above.
        unsafe {
            handles.push(on.reduce_scatter("scatter", memory(&whole), memory(&part)));
            handles.push(on.all_reduce("sum", memory(&summed)));
        }
    }
    for handle in handles {
        handle.unwrap().wait().unwrap();
    }
    [gathered, received, part, summed]
        .map(|t| t.to_device(Device::Cpu))
        .into()
}

#[test]
fn nccl_gives_what_messages_give() {
    let Some(both) = Both::start(SOON) else { return };
    let (host, there) = (both.host.as_ref(), both.there.as_ref());
    for kind in [
        Kind::Float,
        Kind::Double,
        Kind::BFloat16,
        Kind::Int64,
        Kind::Uint8,
    ] {
        for n in [0, 1, 7, 4096, 300_007] {
            let want = results(host, Device::Cpu, kind, n);
            let got = results(there, both.device, kind, n);
            let names = ["gather", "exchange", "scatter", "sum"];
            for (name, (want, got)) in names.iter().zip(want.iter().zip(&got)) {
                assert_eq!(want.size(), got.size(), "{name} {kind:?} {n}");
                if want.numel() == 0 {
                    continue;
                }
                let wide = |t: &Tensor| t.to_kind(Kind::Double);
                let gap = (wide(want) - wide(got)).abs().max().double_value(&[]);
                // Sums of more than two numbers may round in another order; bf16 rounds each sum of 16·ranks.
                let ranks = host.size() as f64;
                let bound = match (kind, *name) {
                    (_, "gather" | "exchange") => 0.0,
                    (Kind::Float, _) => 1e-5 * ranks,
                    (Kind::BFloat16, _) => 0.25 * ranks,
                    (Kind::Double, _) => 1e-13 * ranks,
                    _ => 0.0,
                };
                assert!(gap <= bound, "{name} {kind:?} {n}: {gap}");
            }
        }
        println!("rank {} of {}: {kind:?} agrees", host.place(), host.size());
    }
    speed(&both);
    both.end();
}

/// Bytes a second of the gather that sharded parameters need.
fn speed(both: &Both) {
    let size = both.host.size();
    let own = Tensor::ones([64 << 20], (Kind::BFloat16, both.device));
    let all = Tensor::zeros([(64 << 20) * size as i64], (Kind::BFloat16, both.device));
    let mut begin = Instant::now();
    for round in 0..6 {
        if round == 1 {
            tch::Cuda::synchronize(both.number as i64);
            begin = Instant::now();
        }
        // SAFETY: both live until the device is done.
        unsafe { both.there.all_gather("speed", memory(&own), memory(&all)) }
            .unwrap()
            .wait()
            .unwrap();
    }
    tch::Cuda::synchronize(both.number as i64);
    let seconds = begin.elapsed().as_secs_f64() / 5.0;
    if both.host.place() == 0 {
        let bytes = (128 << 20) as f64 * (size - 1) as f64;
        println!(
            "all-gather of 128 MiB a rank: {:.2} ms, {:.0} GB/s from others",
            1e3 * seconds,
            bytes / seconds / 1e9
        );
    }
    assert_eq!(all.sum(Kind::Double).double_value(&[]), all.numel() as f64);
}

/// A gather whose handle is dropped goes on writing, and its memory is used again at once.
#[test]
fn a_dropped_operation_writes_to_nobody_elses_memory() {
    let Some(both) = Both::start(SOON) else { return };
    let count = 4 << 20;
    for round in 0..10 {
        let own = Tensor::ones([count], (Kind::Float, both.device));
        let all = Tensor::zeros([count * both.host.size() as i64], (Kind::Float, both.device));
        tch::Cuda::synchronize(both.number as i64);
        // The others come later, so that the operation is still waiting for them when its handle goes.
        if both.host.place() > 0 {
            std::thread::sleep(Duration::from_millis(30));
        }
        let address = all.data_ptr();
        // SAFETY: the handle is dropped before the tensors.
        drop(unsafe { both.there.all_gather("dropped", memory(&own), memory(&all)) }.unwrap());
        let size = all.size();
        drop(all);
        let fresh = Tensor::full(&size[..], 7.0, (Kind::Float, both.device));
        assert_eq!(
            fresh.data_ptr(),
            address,
            "the allocator gives the same memory again"
        );
        tch::Cuda::synchronize(both.number as i64);
        let other = fresh.ne(7.0).any().double_value(&[]);
        assert_eq!(other, 0.0, "round {round}: the gather wrote over it");
    }
    println!("rank {} kept its numbers", both.host.place());
    both.end();
}

/// The last rank does not come: the others learn which one it is, and their devices go on.
#[test]
fn a_rank_that_does_not_come_is_named_in_time() {
    let limit = Duration::from_secs(5);
    let Some(both) = Both::start(limit) else { return };
    let absent = both.host.size() - 1;
    let summed = Tensor::ones([1000], (Kind::Float, both.device));
    // SAFETY: the tensor lives to the end of the test.
    let sum = |phase| unsafe { both.there.all_reduce(phase, memory(&summed)) };
    sum("all are here").unwrap().wait().unwrap();
    tch::Cuda::synchronize(both.number as i64);
    if absent == 0 {
        println!("skipped: one rank; start it under mpirun -n 2 or more");
    } else if both.host.place() != absent {
        let begin = Instant::now();
        sum("one is not").unwrap().wait().unwrap();
        // Ends when the operation is aborted.
        tch::Cuda::synchronize(both.number as i64);
        let waited = begin.elapsed();
        let error = sum("afterwards").err().expect("the group is of no use");
        println!(
            "rank {} after {:.1} s: {error}",
            both.host.place(),
            waited.as_secs_f64()
        );
        let CommError::Deadline { missing, phase, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!((&missing[..], &phase[..]), (&[absent as u32][..], "one is not"));
        assert!(waited >= limit && waited < 2 * limit, "{waited:?}");
        let alive = Tensor::ones([3], (Kind::Float, both.device)).sum(Kind::Float);
        assert_eq!(alive.double_value(&[]), 3.0);
    }
    both.world.comm.barrier("all have waited", SOON).unwrap();
    both.end();
}
