//! Does the critic learn what the tokens show, and not before they show it?
//!
//! Every trial has one token that decides its reward, at a place that the test chooses; all others are random and
//! new in every step, so nothing can be learned by heart. The prediction before a sampled token sees what lies
//! before that token: it must be the reward where the deciding token has gone by, and the mean reward where it has
//! not. A prediction that is read one place too late, or a return that is one token off, fails at the edge.

use super::*;

const GOOD: u32 = 1;
const BAD: u32 = 2;
/// Sampled tokens of every sequence: a turn of two, the answer of a tool, a turn of three.
const SAMPLED: [usize; 5] = [3, 4, 7, 8, 9];
const LENGTH: usize = 10;

fn trial(rng: &mut ChaCha8Rng, group: u64, sample: u32, deciding: usize) -> Trajectory {
    let good = rng.random_bool(0.5);
    let mut s = TokenSequence {
        weight: 1.0,
        prompt_len: SAMPLED[0] as u32,
        ..TokenSequence::default()
    };
    for t in 0..LENGTH {
        let id = match (t == deciding, good) {
            (false, _) => rng.random_range(3..VOCAB as u32),
            (true, true) => GOOD,
            (true, false) => BAD,
        };
        let sampled = SAMPLED.contains(&t);
        s.token_ids.push(id);
        s.loss_mask.push(sampled);
        s.logprobs.push(if sampled { -2.0 } else { 0.0 });
        s.versions.push(0);
    }
    trajectory(group, sample, f64::from(u8::from(good)), vec![s])
}

fn batch_of(rng: &mut ChaCha8Rng, step: u32, deciding: usize) -> TrainBatch {
    let trials = (0..24).map(|sample| trial(rng, 0, sample, deciding)).collect();
    TrainBatch {
        step,
        groups: vec![group(0, trials)],
    }
}

/// A trainer whose policy stays as it is, after `steps` updates of the critic, and the metrics of the last one.
fn after(steps: u32, deciding: usize, gamma: f64, lambda: f64) -> (Trainer, StepMetrics) {
    let mut config = config();
    config.estimator = AdvantageEstimator::Gae { gamma, lambda };
    config.objective.aggregation = Aggregation::TokenMean;
    config.critic.lr = LrSchedule::constant(1e-2);
    config.critic.warmup_steps = u32::MAX;
    config.max_token_len_per_gpu = 4096;
    config.backward = BackwardMode::BlockGraphs;
    let mut trainer = Trainer::new(config, model(1, 0.2, true), None)
        .unwrap()
        .with_critic(model(1, 0.2, true));
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    let mut last = None;
    for step in 1..=steps {
        last = Some(trainer.step(&batch_of(&mut rng, step, deciding)).unwrap());
    }
    (trainer, last.unwrap())
}

/// Predictions for new trials, `(reward, by sampled token)`.
fn predictions(trainer: &Trainer, deciding: usize) -> Vec<(f64, Vec<f64>)> {
    let batch = batch_of(&mut ChaCha8Rng::seed_from_u64(77), 1, deciding);
    let mut samples = samples(&batch, &trainer.config);
    let critic = trainer.critic.as_ref().unwrap();
    critic.predict(&trainer.config, &mut samples).unwrap();
    let trials = samples.trials.iter().zip(&samples.sequences);
    trials
        .map(|(trial, s)| (trial.reward, s.values.clone()))
        .collect()
}

#[test]
fn predictions_are_the_reward_from_the_token_after_the_deciding_one() {
    // The first sampled token, the tool's last one, the last sampled one.
    for deciding in [3, 6, 9] {
        let (trainer, metrics) = after(100, deciding, 1.0, 1.0);
        let known = SAMPLED.map(|t| t > deciding);
        for (reward, values) in predictions(&trainer, deciding) {
            for ((value, t), known) in values.iter().zip(SAMPLED).zip(known) {
                let (want, limit) = if known { (reward, 0.2) } else { (0.5, 0.3) };
                assert!(
                    (value - want).abs() < limit,
                    "token {deciding} decides: {value} before token {t} of a trial with reward {reward}"
                );
            }
        }
        // All of the variance where the reward is known, none where it is not.
        let share = known.iter().filter(|known| **known).count() as f64 / SAMPLED.len() as f64;
        let explained = metrics.get("critic/vf_explained_var").unwrap();
        println!("token {deciding} decides: explained variance {explained:.3}, the tokens show {share:.1}");
        assert!(
            (explained - share).abs() < 0.1,
            "token {deciding} decides: {explained} instead of {share}"
        );
    }
}

#[test]
fn bootstrapped_and_discounted_predictions_are_the_discounted_reward() {
    for (gamma, lambda) in [(0.8, 1.0), (0.9, 0.5)] {
        let (trainer, metrics) = after(120, 2, gamma, lambda);
        let mut gap: f64 = 0.0;
        for (reward, values) in predictions(&trainer, 2) {
            for (k, value) in values.iter().enumerate() {
                let left = (SAMPLED.len() - 1 - k) as i32;
                gap = gap.max((value - reward * gamma.powi(left)).abs());
            }
        }
        let explained = metrics.get("critic/vf_explained_var").unwrap();
        println!("gamma {gamma}, lambda {lambda}: {gap:.3} at most, explained variance {explained:.3}");
        assert!(gap < 0.2, "gamma {gamma}, lambda {lambda}: {gap}");
        assert!(explained > 0.9, "gamma {gamma}, lambda {lambda}: {explained}");
    }
}
