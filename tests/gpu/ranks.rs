//! Two steps of a trainer that is spread over GPUs against one on a single GPU. Runs under `mpirun -n 2`;
//! TEST_SP_SIZE and TEST_EP_SIZE in the environment choose the plan, 1 and 1 without.

use super::{
    fixture, gpu,
    trainer::{batch, config},
    FAMILIES,
};
use legorl::{
    comm::launch_world,
    model::net::{Device, Policy},
    train::trainer::{BackwardMode, Mesh, MeshConfig, StepMetrics, Trainer},
};
use std::{sync::Arc, time::Duration};

fn size_of(variable: &str) -> u32 {
    std::env::var(variable).map_or(1, |text| text.parse().unwrap())
}

fn second_step(mut trainer: Trainer) -> StepMetrics {
    trainer.step(&batch(1)).unwrap();
    trainer.step(&batch(2)).unwrap()
}

#[test]
fn a_step_over_gpus_is_that_of_one() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(number) = device else {
        unreachable!("gpu() gives CUDA devices")
    };
    let world = launch_world().unwrap();
    if world.comm.size() < 2 {
        println!("skipped: one rank; start it under mpirun -n 2");
        return world.shutdown().unwrap();
    }
    let (sequence, experts) = (size_of("TEST_SP_SIZE"), size_of("TEST_EP_SIZE"));
    let mesh = MeshConfig {
        ranks: (0..world.comm.size()).collect(),
        sequence,
        experts,
        device: Some(number),
        timeout: Duration::from_secs(60),
    };
    let mesh = Arc::new(Mesh::new(&world.comm, &mesh).unwrap());
    for name in FAMILIES {
        let is_sparse = name.contains("moe") || name.contains("next");
        if experts > 1 && !is_sparse {
            continue;
        }
        let whole = Policy::load(&fixture(name), device).unwrap();
        let part = |spec: &legorl::model::hf::TensorSpec, t: tch::Tensor| mesh.share(&spec.name, &t);
        let parts = Policy::load_parts(&fixture(name), device, part).unwrap();
        let settings = || config(BackwardMode::BlockLoop);
        let one = second_step(Trainer::new(settings(), whole, None).unwrap());
        let spread = Trainer::over_ranks(settings(), parts, None, Some(mesh.clone())).unwrap();
        let many = second_step(spread);
        let gap = |key: &str| {
            let (a, b) = (one.get(key).unwrap(), many.get(key).unwrap());
            ((a - b) / a).abs()
        };
        let (loss, norm) = (gap("actor/loss"), gap("actor/grad_norm"));
        if world.comm.rank() == 0 {
            println!("{name:20} SP {sequence} EP {experts}: loss {loss:.1e}, grad norm {norm:.1e}");
        }
        // Delta nets with random weights magnify rounding.
        let bound = if name.contains("next") || name.contains('5') {
            2e-2
        } else {
            1e-5
        };
        assert!(loss < bound && norm < bound, "{name}: {loss} {norm}");
    }
    drop(mesh);
    world.shutdown().unwrap();
}
