//! A trainer that is spread over GPUs against one on a single GPU: shards alone, sequences (`SP_SIZE`) and experts
//! (`EP_SIZE`) shared, and both. Runs under `mpirun -n N`.
//!
//! Compared are loss, gradient norm and every tensor's gradient of the first step, loss and norm of the second. The
//! gradients are read from what the optimizer keeps: its first moment after one update is the gradient times 1 − β1.
//! A mixture replays experts that were recorded, but for some tokens, which choose freely.
//!
//! f32 (which is f64 for the families with a delta net) is held to 1e-5. Rounding to bf16 is another matter: the
//! gradients over ranks must be as near to those in f32 as those of one GPU in bf16 are. For that the norm behind the
//! delta rule gets a larger epsilon: with that of the fixtures it turns bf16 into noise, on one GPU as well.
//!
//! `TEST_DEVICE=cpu` runs the same on the CPU, where the ranks exchange by messages.

use super::{
    fixture, gpu,
    trainer::{batch, config},
};
use legorl::{
    base::{RoutingRun, RoutingShape, RoutingStore, SequenceRouting},
    comm::{launch_world, CommError, Communicator, Inbox, Tag, World},
    model::net::{ComputeType, Device, Policy},
    train::{
        batch::TrainBatch,
        checkpoint::TensorPiece,
        trainer::{BackwardMode, Mesh, MeshConfig, StepMetrics, Trainer, TrainerConfig},
    },
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

const FAMILIES: [&str; 4] = ["qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_moe"];

/// This process among the ranks, and its device; `None`, with a line that says why, where there is nothing to test.
fn ranks() -> Option<(World, Device)> {
    let device = match std::env::var("TEST_DEVICE") {
        Ok(name) if name == "cpu" => Device::Cpu,
        _ => gpu()?,
    };
    let world = launch_world().unwrap();
    if world.comm.size() < 2 {
        println!("skipped: one rank; start it under mpirun -n 2 or more");
        world.shutdown().unwrap();
        return None;
    }
    Some((world, device))
}

/// A world whose groups do not meet those of another plan: inboxes are opened once a process.
struct Apart {
    comm: Arc<dyn Communicator>,
    plan: u16,
}

impl Apart {
    fn tag(&self, tag: Tag) -> Tag {
        Tag(tag.0 + 64 * (self.plan + 1))
    }
}

impl Communicator for Apart {
    fn rank(&self) -> u32 {
        self.comm.rank()
    }
    fn size(&self) -> u32 {
        self.comm.size()
    }
    fn send(&self, dest: u32, tag: Tag, payload: bytes::Bytes) -> Result<(), CommError> {
        self.comm.send(dest, self.tag(tag), payload)
    }
    fn inbox(&self, from: u32, tag: Tag) -> Result<Inbox, CommError> {
        self.comm.inbox(from, self.tag(tag))
    }
    fn barrier(&self, phase: &str, timeout: Duration) -> Result<(), CommError> {
        self.comm.barrier(phase, timeout)
    }
    fn broadcast(
        &self,
        phase: &str,
        root: u32,
        data: &mut Vec<u8>,
        timeout: Duration,
    ) -> Result<(), CommError> {
        self.comm.broadcast(phase, root, data, timeout)
    }
    fn all_reduce_sum_f32(&self, phase: &str, data: &mut [f32], timeout: Duration) -> Result<(), CommError> {
        self.comm.all_reduce_sum_f32(phase, data, timeout)
    }
    fn all_reduce_sum_f64(&self, phase: &str, data: &mut [f64], timeout: Duration) -> Result<(), CommError> {
        self.comm.all_reduce_sum_f64(phase, data, timeout)
    }
}

/// `SP_SIZE` and `EP_SIZE`.
type Plan = (u32, u32);

/// Nothing shared, one of the two, both; over four ranks also the mixed ones, where a rank is in groups of different
/// members.
fn plans(ranks: u32) -> Vec<Plan> {
    let mut plans = vec![(1, 1), (ranks, 1), (1, ranks), (ranks, ranks)];
    if ranks == 4 {
        plans.extend([(2, 2), (2, 4), (4, 2)]);
    }
    plans
}

fn mesh(
    comm: &Arc<dyn Communicator>,
    (sequence, experts): Plan,
    device: Device,
    timeout: Duration,
) -> Arc<Mesh> {
    let config = MeshConfig {
        ranks: (0..comm.size()).collect(),
        sequence,
        experts,
        device: match device {
            Device::Cuda(number) => Some(number),
            _ => None,
        },
        timeout,
    };
    Arc::new(Mesh::new(comm, &config).unwrap())
}

fn shape(policy: &Policy) -> Option<RoutingShape> {
    let experts = policy.config.experts?;
    Some(RoutingShape {
        num_experts: experts.num_experts as u32,
        layers: policy.config.num_sparse_layers() as u32,
        top_k: experts.top_k as u32,
    })
}

/// Every sequence with experts on record: different ones in every layer, for all tokens but five.
fn with_routing(mut batch: TrainBatch, shape: RoutingShape) -> TrainBatch {
    let trajectories = batch.groups.iter_mut().flat_map(|g| &mut g.trajectories);
    for (i, sequence) in trajectories.flat_map(|t| &mut t.sequences).enumerate() {
        let tokens = sequence.token_ids.len() as u32 - 1;
        let expert = |token: u32, layer: u32, choice: u32| {
            let first = token * 5 + layer * 3 + i as u32 * 7 + token * token;
            ((first + choice) % shape.num_experts) as u16
        };
        let mut experts = Vec::new();
        for token in 0..tokens {
            for layer in 0..shape.layers {
                experts.extend((0..shape.top_k).map(|choice| expert(token, layer, choice)));
            }
        }
        let store: Arc<dyn RoutingStore> = Arc::new(shape.encode(&experts).unwrap());
        let run = |first: u32, end: u32| RoutingRun {
            first,
            tokens: end - first,
            store: store.clone(),
            at: u64::from(first) * shape.row_bytes() as u64,
        };
        sequence.routing = Some(SequenceRouting {
            shape,
            runs: vec![run(0, 20), run(25, tokens)],
        });
    }
    batch
}

/// A model folder in one element type.
#[derive(Clone, Copy)]
struct Case<'a> {
    folder: &'a Path,
    compute: ComputeType,
    device: Device,
}

/// What two steps say, and the gradients of the first.
struct Steps {
    metrics: [StepMetrics; 2],
    gradients: Vec<TensorPiece>,
}

impl Case<'_> {
    fn config(&self, shape: Option<RoutingShape>) -> TrainerConfig {
        let mut config = config(BackwardMode::BlockLoop);
        // In f32 every sequence is a row of its own on any number of ranks: the rounding of another cut is not
        // what is compared. bf16 packs.
        if self.compute == ComputeType::F32 {
            config.max_token_len_per_gpu = 1;
        }
        config.max_grad_norm = f64::MAX;
        config.replay = shape;
        config
    }

    fn steps(&self, mesh: Option<Arc<Mesh>>) -> Steps {
        let policy = match &mesh {
            None => Policy::load(self.folder, self.device),
            Some(mesh) => Policy::load_parts(self.folder, self.device, |spec, t| mesh.share(&spec.name, &t)),
        };
        let policy = policy.unwrap().with_compute_type(self.compute);
        let shape = shape(&policy);
        let batch = |step| match shape {
            Some(shape) => with_routing(batch(step), shape),
            None => batch(step),
        };
        let mut trainer = Trainer::over_ranks(self.config(shape), policy, None, mesh).unwrap();
        let first = trainer.step(&batch(1)).unwrap();
        // Every rank compares its own part.
        let mut gradients = trainer.save_state().unwrap().optimizer;
        gradients.retain(|t| t.name.starts_with("exp_avg."));
        assert!(!gradients.is_empty());
        let second = trainer.step(&batch(2)).unwrap();
        Steps {
            metrics: [first, second],
            gradients,
        }
    }
}

fn values(piece: &TensorPiece) -> impl Iterator<Item = f64> + '_ {
    let numbers = piece.data.chunks_exact(4);
    numbers.map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
}

/// The tensors of which this rank has a part: whole, and that part.
fn pairs<'a>(want: &'a Steps, got: &'a Steps) -> impl Iterator<Item = (&'a TensorPiece, &'a TensorPiece)> {
    got.gradients.iter().map(|piece| {
        let whole = want.gradients.iter().find(|whole| whole.name == piece.name);
        (whole.unwrap(), piece)
    })
}

/// Squares of the difference on this rank's part, and of the whole of `want`, over some tensors. The pieces of `want`
/// are whole tensors.
fn squares<'a>(pairs: impl Iterator<Item = (&'a TensorPiece, &'a TensorPiece)>) -> (f64, f64) {
    pairs.fold((0.0, 0.0), |(gap, all), (want, got)| {
        assert_eq!((&want.name, &want.shape), (&got.name, &got.shape));
        assert!(want.is_whole());
        let own = values(want).skip(got.offset).zip(values(got));
        let square = |x: f64| x * x;
        (
            gap + own.map(|(a, b)| square(a - b)).sum::<f64>(),
            all + values(want).map(square).sum::<f64>(),
        )
    })
}

/// Relative L2 of the gradients of all parameters.
fn far(want: &Steps, got: &Steps) -> f64 {
    let (gap, all) = squares(pairs(want, got));
    (gap / all).sqrt()
}

fn relative(key: &str, step: usize, want: &Steps, got: &Steps) -> f64 {
    let [a, b] = [want, got].map(|steps| steps.metrics[step].get(key).unwrap());
    ((a - b) / a).abs()
}

/// The largest relative L2 of a tensor's gradient, and which.
fn worst<'a>(want: &'a Steps, got: &'a Steps) -> (f64, &'a str) {
    let each = pairs(want, got).map(|(a, b)| {
        let (gap, all) = squares(std::iter::once((a, b)));
        // As the CPU's tests have it: sums in which most cancels.
        let is_cancelling = a.name.ends_with("A_log") || a.name.ends_with("dt_bias");
        let scale = if is_cancelling { 10.0 } else { 1.0 };
        // A gradient of zeros, as that of a norm's offset, has no direction.
        ((gap / all.max(1e-30)).sqrt() / scale, &a.name[..])
    });
    each.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

/// A family with what one GPU makes of it.
struct Alone {
    name: &'static str,
    folder: PathBuf,
    /// With a larger epsilon, for bf16.
    smooth: tempfile::TempDir,
    f32: Steps,
    smooth_f32: Steps,
    smooth_bf16: Steps,
}

impl Alone {
    fn new(name: &'static str, device: Device) -> Self {
        let (folder, smooth) = (fixture(name), tempfile::tempdir().unwrap());
        for file in std::fs::read_dir(&folder).unwrap() {
            let path = file.unwrap().path();
            std::fs::copy(&path, smooth.path().join(path.file_name().unwrap())).unwrap();
        }
        if name.contains("next") || name.contains('5') {
            let config = smooth.path().join("config.json");
            let text = std::fs::read_to_string(&config).unwrap();
            let raised = text.replace("\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 1e-02");
            assert_ne!(raised, text);
            std::fs::write(config, raised).unwrap();
        }
        let steps = |folder: &Path, compute| {
            let case = Case {
                folder,
                compute,
                device,
            };
            case.steps(None)
        };
        Self {
            name,
            f32: steps(&folder, ComputeType::F32),
            smooth_f32: steps(smooth.path(), ComputeType::F32),
            smooth_bf16: steps(smooth.path(), ComputeType::Bf16),
            folder,
            smooth,
        }
    }

    /// The same over the ranks of a mesh: what was seen, and what of it is wrong.
    fn against(&self, plan: Plan, mesh: &Arc<Mesh>, device: Device) -> (Vec<String>, Vec<String>) {
        let (mut seen, mut wrong) = (Vec::new(), Vec::new());
        let mut hold = |what: &str, seen: f64, bound: f64| {
            // Also where it is not a number.
            if seen.is_nan() || seen >= bound {
                let name = self.name;
                wrong.push(format!(
                    "{name} SP,EP {plan:?}: {what} {seen:.1e}, bound {bound:.1e}"
                ));
            }
        };
        let (loss, norm) = ("actor/loss", "actor/grad_norm");
        let steps = |folder: &Path, compute| {
            let case = Case {
                folder,
                compute,
                device,
            };
            case.steps(Some(mesh.clone()))
        };

        let (one, many) = (&self.f32, steps(&self.folder, ComputeType::F32));
        let (gradient, tensor) = worst(one, &many);
        let [losses, norms] = [loss, norm].map(|key| [0, 1].map(|step| relative(key, step, one, &many)));
        seen.push(format!(
            "{:12} f32  SP,EP {plan:?}: loss {:.1e}, norm {:.1e}, gradients {:.1e} (worst {gradient:.1e}, {tensor}), second step {:.1e}, {:.1e}",
            self.name, losses[0], norms[0], far(one, &many), losses[1], norms[1],
        ));
        hold("loss in f32", losses[0], 1e-5);
        hold("gradient norm in f32", norms[0], 1e-5);
        hold(tensor, gradient, 1e-5);
        // Adam's first step is the gradient's sign, so that gradients of the size of rounding turn with it.
        hold("second loss in f32", losses[1], 1e-3);
        hold("second gradient norm in f32", norms[1], 1e-2);

        let (exact, one) = (&self.smooth_f32, &self.smooth_bf16);
        let many = steps(self.smooth.path(), ComputeType::Bf16);
        let (gap, of_one) = (far(exact, &many), far(exact, one));
        let [losses, norms] = [loss, norm].map(|key| [&many, one].map(|got| relative(key, 0, exact, got)));
        seen.push(format!(
            "{:12} bf16 SP,EP {plan:?}, from f32 (one GPU): loss {:.1e} ({:.1e}), norm {:.1e} ({:.1e}), gradients {gap:.1e} ({of_one:.1e})",
            self.name, losses[0], losses[1], norms[0], norms[1],
        ));
        hold("gradients in bf16", gap, 1.5 * of_one + 0.02);
        hold("loss in bf16", losses[0], 3.0 * losses[1] + 1e-3);
        hold("gradient norm in bf16", norms[0], 3.0 * norms[1] + 2e-2);
        (seen, wrong)
    }
}

#[test]
fn a_step_over_gpus_is_that_of_one() {
    let Some((world, device)) = ranks() else { return };
    // On every rank, by itself.
    let families = FAMILIES.map(|name| Alone::new(name, device));
    // All that is wrong, so that one launch shows it.
    let mut wrong = Vec::new();
    for (number, plan) in plans(world.comm.size()).into_iter().enumerate() {
        let comm: Arc<dyn Communicator> = Arc::new(Apart {
            comm: world.comm.clone(),
            plan: number as u16,
        });
        let mesh = mesh(&comm, plan, device, Duration::from_secs(60));
        for family in &families {
            if plan.1 > 1 && family.name == "qwen3" {
                continue;
            }
            let (seen, found) = family.against(plan, &mesh, device);
            if world.comm.rank() == 0 {
                println!("{}", seen.join("\n"));
            }
            wrong.extend(found);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    world.shutdown().unwrap();
}

/// The last rank does not make the step.
#[test]
fn a_rank_that_makes_no_step_is_named_in_time() {
    let Some((world, device)) = ranks() else { return };
    let absent = world.comm.size() - 1;
    let limit = Duration::from_secs(6);
    let mesh = mesh(&world.comm, (1, 1), device, limit);
    let policy = Policy::load_parts(&fixture("qwen3"), device, |spec, t| mesh.share(&spec.name, &t)).unwrap();
    let mut trainer = Trainer::over_ranks(config(BackwardMode::BlockLoop), policy, None, Some(mesh)).unwrap();
    // Kernels load, and the groups have worked before.
    trainer.step(&batch(1)).unwrap();
    if world.comm.rank() != absent {
        let begin = Instant::now();
        let error = trainer.step(&batch(2)).unwrap_err().to_string();
        let waited = begin.elapsed();
        println!("after {:.1} s: {error}", waited.as_secs_f64());
        assert!(error.contains(&format!("for rank {absent}:")), "{error}");
        assert!(waited >= limit && waited < 3 * limit, "{waited:?}");
    }
    let all = Duration::from_secs(60);
    world.comm.barrier("all have waited", all).unwrap();
    drop(trainer);
    world.shutdown().unwrap();
}
