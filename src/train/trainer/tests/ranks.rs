//! The trainer over several ranks against the trainer on one: as threads of this process, and as processes
//! under `mpirun`, which runs this test program again.

use super::{
    families::{build, load, neighbour, FAMILIES},
    *,
};
use crate::{
    comm::{inprocess, launch_world, Communicator},
    train::checkpoint::PieceIndex,
};
use std::{
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

const ROLE: &str = "LEGORL_TEST_TRAINER_RANK_OF";
pub(super) const FOLDER: &str = "LEGORL_TEST_FOLDER";

/// Ranks that share a sequence, and ranks that share experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Plan {
    pub(super) sequence: u32,
    pub(super) experts: u32,
}

pub(super) const FSDP: Plan = Plan {
    sequence: 1,
    experts: 1,
};

/// Plans of a world: those with experts for families that have some.
pub(super) fn plans(ranks: u32, family: &str) -> Vec<Plan> {
    let mut plans = vec![FSDP];
    let plan = |sequence, experts| Plan { sequence, experts };
    plans.push(plan(ranks, 1));
    if family.contains("moe") || family == "qwen3_next" {
        plans.extend([plan(1, ranks), plan(ranks, ranks)]);
        if ranks == 4 {
            plans.extend([plan(2, 2), plan(2, 4), plan(4, 2), plan(1, 2)]);
        }
    } else if ranks == 4 {
        plans.push(plan(2, 1));
    }
    plans
}

/// The mesh of all ranks of a world. A world has one at a time: tags are opened once.
pub(super) fn mesh(comm: &Arc<dyn Communicator>, plan: Plan) -> Arc<Mesh> {
    let config = MeshConfig {
        ranks: (0..comm.size()).collect(),
        sequence: plan.sequence,
        experts: plan.experts,
        device: None,
        timeout: Duration::from_secs(60),
    };
    Arc::new(Mesh::new(comm, &config).unwrap())
}

/// Whole gradients and the sums of the first update, against old log-probabilities away from the current.
fn whole_gradients(
    config: TrainerConfig,
    (policy, reference): (Policy, Policy),
    batch: &TrainBatch,
    mesh: Option<Arc<Mesh>>,
) -> (Vec<Tensor>, ObjectiveSums, f64) {
    tch::set_num_threads(1);
    let mut samples = samples(batch, &config);
    let trainer = Trainer::over_ranks(config, policy, Some(reference), mesh).unwrap();
    trainer.recompute_logprobs(&mut samples).unwrap();
    let reference = trainer.reference.as_ref().unwrap();
    reference_logprobs(reference, &trainer.config, &mut samples).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(99);
    for sample in &mut samples.sequences {
        for l in sample.training_logprobs.as_mut().unwrap() {
            *l += rng.random_range(-0.3..0.3);
        }
    }
    let all: Vec<usize> = samples.mini_batches()[0].clone();
    let (gradients, sums) = trainer
        .gradients(&mut samples, &all, &mut StageTimer::default())
        .unwrap();
    let norm = trainer.shards.global_norm(&gradients).unwrap();
    let whole = trainer.shards.whole_tensors(&gradients.tensors).unwrap();
    (whole, sums, norm)
}

/// Settings, policy and reference. Where f32 is the arithmetic, every sequence is a row of its own on any number
/// of ranks, because the rounding of another cut is not what is compared. f64, in which f32 hybrids compute as
/// well, compares packed rows that are cut in different ways.
fn case(family: &str, double: bool) -> (TrainerConfig, (Policy, Policy)) {
    let mut config = with_kl_and_entropy(config());
    let (policy, reference) = (build(family, double), neighbour(family, double));
    let is_wide = double || policy.compute_kind() == Kind::Double;
    config.max_token_len_per_gpu = if is_wide { 24 } else { 1 };
    config.temperature = 0.8;
    (config, (policy, reference))
}

/// All families and plans of this world; every rank compares.
fn compare_gradients(family: &str, plan: Plan, double: bool, mesh: Arc<Mesh>) {
    let batch = batch(3, 3);
    let (config, networks) = case(family, double);
    let (one, one_sums, one_norm) = whole_gradients(config, networks, &batch, None);
    let (config, networks) = case(family, double);
    let (many, sums, norm) = whole_gradients(config, networks, &batch, Some(mesh));
    let limit = if double { 1e-10 } else { 1e-5 };
    let names = load(family).parameters().into_iter().map(|(name, _)| name);
    for ((name, many), one) in names.zip(many).zip(one) {
        let gap = relative_gap(&[many], &[one]);
        println!("{family} {plan:?} double {double} {name}: {gap:.1e}");
        assert!(gap < limit, "{family} {plan:?} double {double} {name}: {gap:e}");
    }
    assert!((sums.loss - one_sums.loss).abs() < limit, "{family} {plan:?}");
    assert_eq!(sums.tokens, one_sums.tokens);
    assert!(
        (norm / one_norm - 1.0).abs() < limit,
        "{family} {plan:?}: {norm} {one_norm}"
    );
}

/// Runs `body` on a world of threads.
pub(super) fn on_threads<T: Send>(ranks: u32, body: impl Fn(Arc<dyn Communicator>) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = inprocess::world(ranks)
            .into_iter()
            .map(|comm| scope.spawn(move || body(comm)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_unit_that_is_released_on_its_way_or_fails_to_come_is_away() {
    on_threads(2, |comm| {
        let config = MeshConfig {
            ranks: vec![0, 1],
            sequence: 1,
            experts: 1,
            device: None,
            timeout: Duration::from_secs(5),
        };
        let mesh = Arc::new(Mesh::new(&comm, &config).unwrap());
        let shards = Shards::new(units_of(&load("qwen3"), true), Some(mesh));
        shards.prefetch(1).unwrap();
        let coming = shards.held_bytes();
        shards.release(1);
        assert!(coming > 0 && shards.held_bytes() == 0, "{coming}");
        shards.load(1).unwrap();
        assert_eq!(shards.held_bytes(), coming);
        shards.release(1);
        assert_eq!(shards.held_bytes(), 0);
        // The other rank does not come.
        if comm.rank() == 0 {
            assert!(shards.load(2).is_err());
            assert_eq!(shards.held_bytes(), 0);
        }
    });
}

#[test]
fn gradients_are_those_of_one_rank_in_f64() {
    for family in FAMILIES {
        for ranks in [2, 4] {
            for plan in plans(ranks, family) {
                on_threads(ranks, |comm| {
                    compare_gradients(family, plan, true, mesh(&comm, plan))
                });
            }
        }
    }
}

/// Two plans a family: shards alone, and everything shared by all ranks.
#[test]
fn gradients_are_those_of_one_rank_in_f32() {
    for family in FAMILIES {
        let all = plans(4, family);
        for plan in [all[0], *all.get(3).unwrap_or(&all[1])] {
            on_threads(4, |comm| {
                compare_gradients(family, plan, false, mesh(&comm, plan))
            });
        }
    }
}

/// Bytes of a rank's part fall with the number of ranks, and of the rest at most two units are here.
#[test]
fn a_rank_holds_its_share_and_at_most_two_gathered_units() {
    for family in ["qwen3_untied_bias", "qwen3_5_moe"] {
        let (config, networks) = case(family, false);
        let whole = Trainer::new(config, networks.0, Some(networks.1))
            .unwrap()
            .memory();
        for ranks in [2, 4] {
            for plan in plans(ranks, family) {
                let memories = on_threads(ranks, |comm| {
                    let (config, networks) = case(family, false);
                    let mesh = Some(mesh(&comm, plan));
                    let mut trainer =
                        Trainer::over_ranks(config, networks.0, Some(networks.1), mesh).unwrap();
                    trainer.step(&batch(3, 3)).unwrap();
                    let away = trainer
                        .policy
                        .parameters()
                        .iter()
                        .map(|(_, p)| p.numel())
                        .sum::<usize>();
                    assert_eq!(away, 0, "nothing is gathered between two steps");
                    let tensors = |list: &[Tensor]| list.iter().map(|t| t.numel() * 4).sum::<usize>();
                    let gradients = tensors(&trainer.shards.zero_gradients().tensors);
                    (trainer.memory(), gradients, trainer.optimizer.size_bytes())
                });
                for (memory, gradients, moments) in memories {
                    // Padding is at most a number a rank and tensor.
                    let share = whole.shares as f64 / f64::from(ranks);
                    let ratio = memory.shares as f64 / share;
                    println!(
                        "{family} {ranks} ranks {plan:?}: shares {} of {} ({ratio:.4} of 1/n), gathered at most {} \
                         (largest unit {})",
                        memory.shares, whole.shares, memory.gathered_peak, memory.largest_unit
                    );
                    assert!((1.0..1.01).contains(&ratio), "{ratio}");
                    assert_eq!((gradients, moments), (memory.shares, 2 * memory.shares));
                    assert!(memory.gathered_peak <= 2 * memory.largest_unit);
                    assert!(memory.gathered_peak > 0);
                }
            }
        }
    }
}

/// What two steps leave: losses, norms and weights.
pub(super) fn two_steps(
    family: &str,
    config: &TrainerConfig,
    mesh: Option<Arc<Mesh>>,
) -> (Vec<StepMetrics>, Trainer) {
    tch::set_num_threads(1);
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/models")
        .join(family);
    let load = || match &mesh {
        None => load(family),
        Some(mesh) => Policy::load_parts(&folder, Device::Cpu, |spec, t| mesh.share(&spec.name, &t)).unwrap(),
    };
    let reference = config.needs_reference().then(load);
    let critic = config.estimator.needs_critic().then(load);
    let mut trainer = Trainer::over_ranks(config.clone(), load(), reference, mesh.clone()).unwrap();
    if let Some(trunk) = critic {
        trainer = trainer.with_critic(trunk);
    }
    let metrics = (1..=2)
        .map(|step| {
            let mut batch = batch(20 + u64::from(step), 4);
            batch.step = step;
            trainer.step(&batch).unwrap()
        })
        .collect();
    (metrics, trainer)
}

/// With a critic, penalties in the reward, mini-batches and corrections, so that every forward pass is made.
pub(super) fn everything() -> TrainerConfig {
    let mut config = with_kl_and_entropy(config());
    config.estimator = AdvantageEstimator::Gae {
        gamma: 1.0,
        lambda: 0.95,
    };
    config.mini_batch_groups = 2;
    config.lr = LrSchedule::constant(1e-4);
    config.backward = BackwardMode::BlockGraphs;
    config
}

/// The same steps, and the state that they leave goes on alike on another number of ranks.
#[test]
fn steps_and_saved_states_do_not_depend_on_the_number_of_ranks() {
    let same = |a: &StepMetrics, b: &StepMetrics| {
        for key in [
            "actor/loss",
            "actor/grad_norm",
            "actor/entropy",
            "critic/vf_loss",
            "critic/grad_norm",
        ] {
            let (a, b) = (a.get(key).unwrap(), b.get(key).unwrap());
            assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{key}: {a} {b}");
        }
    };
    for family in ["qwen3", "qwen3_moe"] {
        let config = everything();
        let (one, mut trainer) = two_steps(family, &config, None);
        let saved = trainer.save_state().unwrap();
        let mut third = batch(23, 4);
        third.step = 3;
        let continued = trainer.step(&third).unwrap();
        for plan in plans(2, family) {
            on_threads(2, |comm| {
                let mesh = mesh(&comm, plan);
                let (many, ours) = two_steps(family, &config, Some(mesh.clone()));
                one.iter().zip(&many).for_each(|(a, b)| same(a, b));
                // Adam's first steps have the size of the rate, whatever the gradient is: names and shapes alone.
                let state = ours.save_state().unwrap();
                let own: usize = state.actor.iter().map(|piece| piece.range().len()).sum();
                let all: usize = saved.actor.iter().map(|piece| piece.whole_numel()).sum();
                assert!(own > all * 4 / 10 && own < all * 6 / 10, "{own} of {all}");
                drop(ours);
                // The state of one rank, on two.
                let reference = Some(load(family));
                let mut other = Trainer::over_ranks(config.clone(), load(family), reference, Some(mesh))
                    .unwrap()
                    .with_critic(load(family));
                other
                    .load_state(
                        &saved.actor,
                        &saved.optimizer,
                        saved.critic.as_ref(),
                        saved.progress,
                        saved.version,
                    )
                    .unwrap();
                let again = other.save_state().unwrap();
                let lists = |s: &TrainerSnapshot| {
                    let critic = s.critic.clone().unwrap();
                    [
                        s.actor.clone(),
                        s.optimizer.clone(),
                        critic.weights,
                        critic.optimizer,
                    ]
                };
                for (own, whole) in lists(&again).iter().zip(&lists(&saved)) {
                    let whole = PieceIndex::new(whole).unwrap();
                    for piece in own {
                        assert_eq!(whole.shape(&piece.name), Some(&piece.shape[..]));
                        let want: Vec<u8> = whole
                            .bytes(&piece.name, piece.range())
                            .flatten()
                            .copied()
                            .collect();
                        assert_eq!(piece.data, want, "resharding loses nothing: {}", piece.name);
                    }
                }
                same(&other.step(&third).unwrap(), &continued);
            });
        }
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    on_threads(2, |comm| {
        let config = MeshConfig {
            ranks: vec![0, 1],
            sequence: 2,
            experts: 1,
            device: None,
            timeout: Duration::from_millis(300),
        };
        let mesh = Arc::new(Mesh::new(&comm, &config).unwrap());
        let mut trainer = Trainer::over_ranks(super::config(), load("qwen3"), None, Some(mesh)).unwrap();
        if comm.rank() == 0 {
            let error = trainer.step(&batch(3, 1)).unwrap_err().to_string();
            assert!(error.contains("rank 1") && error.contains("embedding"), "{error}");
        }
    });
}

#[test]
fn sizes_that_cannot_be_shared_are_refused_by_variable() {
    on_threads(4, |comm| {
        let config = |sequence, experts| MeshConfig {
            ranks: (0..4).collect(),
            sequence,
            experts,
            device: None,
            timeout: Duration::from_secs(5),
        };
        let error = Mesh::new(&comm, &config(3, 1)).err().unwrap().to_string();
        assert!(error.contains("SP_SIZE=3"), "{error}");
        let mesh = Arc::new(Mesh::new(&comm, &config(1, 4)).unwrap());
        let error = Trainer::over_ranks(super::config(), load("qwen3"), None, Some(mesh));
        let error = error.err().unwrap().to_string();
        assert!(error.contains("EP_SIZE=4"), "{error}");
    });
}

#[test]
fn a_batch_travels_bit_for_bit() {
    let mut sent = batch(3, 3);
    sent.groups[1].dropped.push((
        TrialKey {
            purpose: Purpose::Train,
            group: GroupId(1),
            sample: 9,
        },
        DropReason::EnvSetupFailed,
    ));
    sent.groups[2].start_version = PolicyVersion(7);
    sent.groups[0].trajectories[0].outcome.reward = 0.1 + 0.2;
    let bytes = sent.to_bytes().unwrap();
    let got = TrainBatch::from_bytes(&bytes).unwrap();
    assert_eq!(format!("{got:?}"), format!("{sent:?}"));
    assert!(TrainBatch::from_bytes(&bytes[..bytes.len() - 8]).is_err());
}

/// Runs this test again as the ranks of an `mpirun`; they come to `body`.
fn under_mpirun(test: &str, ranks: u32, body: impl FnOnce(&Arc<dyn Communicator>)) {
    let test = format!("ranks::{test}");
    if is_rank_of(&test) {
        return as_rank(ranks, body);
    }
    assert_done(&mpirun(&test, ranks, None), ranks);
}

/// Whether this process is a rank of a test of [`super`], started by [`mpirun`].
pub(super) fn is_rank_of(test: &str) -> bool {
    std::env::var(ROLE).is_ok_and(|role| role == test)
}

/// Joins the world, does the work and leaves.
pub(super) fn as_rank(ranks: u32, body: impl FnOnce(&Arc<dyn Communicator>)) {
    let world = launch_world().expect("the ranks find each other");
    assert_eq!(world.comm.size(), ranks);
    body(&world.comm);
    world.shutdown().expect("all leave");
    println!("rank is done");
}

/// Runs a test of [`super`] as the ranks of an `mpirun`, which find a folder in the variable [`FOLDER`].
pub(super) fn mpirun(test: &str, ranks: u32, folder: Option<&std::path::Path>) -> std::process::Output {
    let mut command = Command::new("mpirun");
    for (name, _) in std::env::vars_os() {
        // The tests may themselves be a step of a Slurm job.
        let name = name.to_string_lossy().into_owned();
        if ["OMPI_", "PMIX_", "PRTE_", "SLURM_"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
        {
            command.env_remove(name);
        }
    }
    if let Some(folder) = folder {
        command.env(FOLDER, folder).args(["-x", FOLDER]);
    }
    command
        .args([
            "--allow-run-as-root",
            "--oversubscribe",
            "-n",
            &ranks.to_string(),
            "-x",
            ROLE,
        ])
        .arg(std::env::current_exe().expect("this program has a path"))
        .args([
            &format!("train::trainer::tests::{test}"),
            "--exact",
            "--nocapture",
        ])
        .env(ROLE, test)
        .stdin(Stdio::null())
        .output()
        .expect("mpirun starts; it is in the package openmpi-bin")
}

/// All ranks came to their end; returns what they said.
pub(super) fn assert_done(output: &std::process::Output, ranks: u32) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{text}");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    assert_eq!(
        text.matches("rank is done").count(),
        ranks as usize,
        "{text}\n{errors}"
    );
    text
}

/// One mesh a process: the plans of a world are several launches of the same comparison.
fn families_under_mpirun(test: &str, ranks: u32, plan: Plan) {
    under_mpirun(test, ranks, |comm| {
        let mesh = mesh(comm, plan);
        for family in FAMILIES {
            if plan.experts > 1 && !plans(ranks, family).contains(&plan) {
                continue;
            }
            for double in [true, false] {
                compare_gradients(family, plan, double, mesh.clone());
            }
        }
    });
}

#[test]
fn mpi_two_ranks_shard() {
    families_under_mpirun("mpi_two_ranks_shard", 2, FSDP);
}

#[test]
fn mpi_two_ranks_share_sequences_and_experts() {
    let plan = Plan {
        sequence: 2,
        experts: 2,
    };
    families_under_mpirun("mpi_two_ranks_share_sequences_and_experts", 2, plan);
}

#[test]
fn mpi_four_ranks_shard() {
    families_under_mpirun("mpi_four_ranks_shard", 4, FSDP);
}

#[test]
fn mpi_four_ranks_share_sequences() {
    let plan = Plan {
        sequence: 4,
        experts: 1,
    };
    families_under_mpirun("mpi_four_ranks_share_sequences", 4, plan);
}

#[test]
fn mpi_four_ranks_share_sequences_and_experts() {
    let plan = Plan {
        sequence: 2,
        experts: 4,
    };
    families_under_mpirun("mpi_four_ranks_share_sequences_and_experts", 4, plan);
}
