//! [`init_policy`]: tokenizer, training, model folder.

use super::{
    fit::{Fit, FitReport},
    measure::right_path_probability,
    model_folder::{model_config, write_tokenizer},
    unseen::Unseen,
    Habits, InitError, InitProgress,
};
use crate::model::{
    chat_template::ChatTemplate,
    hf::{save_folder, ModelType},
    net::Policy,
    tokenizer::Tokenizer,
};
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tch::Device;

/// What to make.
#[derive(Clone, Debug)]
pub struct InitPolicyOptions {
    /// The model folder to write; it must not exist.
    pub output: PathBuf,
    /// Task folders that no transcript may repeat, training and held-out ones alike.
    pub kept_out: Vec<PathBuf>,
    /// Family of the network.
    pub model_type: ModelType,
    /// Optimizer steps of 32 transcripts.
    pub steps: u32,
    /// Seed of weights and transcripts.
    pub seed: u64,
    /// CPU threads; 0 leaves libtorch's own choice.
    pub threads: u32,
    /// How careless the transcripts are.
    pub habits: Habits,
}

impl InitPolicyOptions {
    /// Steps that are enough for names to be copied reliably.
    pub const DEFAULT_STEPS: u32 = 400;
}

/// What was made.
#[derive(Clone, Debug, PartialEq)]
pub struct InitReport {
    /// The model folder.
    pub output: PathBuf,
    /// Trainable numbers.
    pub parameters: usize,
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Tasks that were kept out.
    pub tasks_kept_out: usize,
    /// Transcripts seen.
    pub transcripts: u64,
    /// Tokens seen, prompts included.
    pub tokens: u64,
    /// Cross-entropy of the last step, in nats a sampled token.
    pub last_loss: f64,
    /// Probability that the policy takes the right path, mean over fresh tasks at temperature 1: a lower
    /// bound of the reward that it starts with.
    pub right_path: f64,
    /// Time from start to the finished folder.
    pub elapsed: Duration,
}

/// Makes the demo's starting policy. `progress` is called after every step. The folder appears whole or
/// not at all.
pub fn init_policy(
    options: &InitPolicyOptions,
    mut progress: impl FnMut(&InitProgress),
) -> Result<InitReport, InitError> {
    let started = Instant::now();
    let output = &options.output;
    if output.exists() {
        return Err(InitError::Exists { path: output.clone() });
    }
    let unseen = Unseen::from_folders(&options.kept_out)?;
    if options.threads > 0 {
        tch::set_num_threads(i32::try_from(options.threads).unwrap_or(i32::MAX));
    }
    let draft = Unfinished::new(output)?;
    let folder = draft.path();
    write_tokenizer(folder, options.seed)?;
    let tokenizer = Tokenizer::from_dir(folder)?;
    let template = ChatTemplate::from_dir(folder)?;
    let config = model_config(options.model_type, tokenizer.vocab_size(), tokenizer.stop_ids())?;
    let policy = Policy::random(config, options.seed as i64, Device::Cpu);
    let fit = Fit {
        policy: &policy,
        tokenizer: &tokenizer,
        template: &template,
        unseen: &unseen,
        habits: options.habits,
        steps: options.steps,
        seed: options.seed,
    };
    let FitReport {
        transcripts,
        tokens,
        last_loss,
    } = fit.run(&mut progress)?;
    let right_path = right_path_probability(&policy, &tokenizer, &template, 8, !options.seed)?;
    save_folder(folder, &policy.config, &policy.export(), None)?;
    draft.publish(output)?;
    Ok(InitReport {
        output: output.clone(),
        parameters: policy.config.num_parameters(),
        vocab_size: tokenizer.vocab_size(),
        tasks_kept_out: unseen.len(),
        transcripts,
        tokens,
        last_loss,
        right_path,
        elapsed: started.elapsed(),
    })
}

/// A folder beside the output that vanishes unless it is published.
struct Unfinished {
    path: PathBuf,
    published: bool,
}

impl Unfinished {
    fn new(output: &Path) -> Result<Self, InitError> {
        let mut name = output.file_name().unwrap_or_default().to_owned();
        name.push(format!(".unfinished-{}", std::process::id()));
        let path = output.with_file_name(name);
        std::fs::create_dir_all(&path).map_err(InitError::io(&path))?;
        Ok(Self {
            path,
            published: false,
        })
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn publish(mut self, output: &Path) -> Result<(), InitError> {
        std::fs::rename(&self.path, output).map_err(InitError::io(output))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.published {
            // Nothing is lost when this fails; the name tells what it is.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
