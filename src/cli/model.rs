//! `legorl-rank model`: look at a model folder, run it on given tokens, write it back.

use super::{exec, Parts, Tensors};
use crate::model::hf::{export_folder, Checkpoint, ModelConfig, ModelError, TensorSpec};
#[cfg(feature = "torch")]
use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use std::{fmt::Write as _, path::Path, path::PathBuf, process::ExitCode};

/// What to do with a model folder.
#[derive(Subcommand, Clone, Debug)]
pub enum ModelCommand {
    /// Family, parameters and memory by part; reads the headers alone
    Info {
        /// Folder in Hugging Face layout
        folder: PathBuf,
    },
    /// Read all weights and write them back in the layout that they came in
    Export {
        /// Folder in Hugging Face layout
        folder: PathBuf,
        /// Folder to write; must hold no weights
        output: PathBuf,
    },
    /// Logits, hidden states and routing of given tokens, for comparison with another implementation
    Run(ModelRunArgs),
}

/// Where to compute.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceArg {
    /// Host.
    Cpu,
    /// First CUDA device.
    Cuda,
}

/// Element type of the residual stream.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum DtypeArg {
    /// 32-bit float; 64-bit for families with a delta net.
    F32,
    /// bfloat16; norms, softmaxes and the delta rule stay f32.
    Bf16,
}

/// Arguments of `model run`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
The output holds, for input_ids [B,T] (all rows have T tokens: none is padded) of L layers (S of them sparse):
  logits [B,T,V], logprobs [B,T-1] of the tokens that follow,
  hidden [(L+1)*B,T,H], layer by layer (row l*B+b is of sequence b): embeddings, outputs of all layers but the
    last, final norm,
  topk [S,B*T,k] and topk_w: experts, most likely first, and their weights as they multiply the experts' outputs,
    so summing to 1 where norm_topk_prob says so (sparse families); row b*T+t is of token t of sequence b,
  greedy [B,8+N] (T+N where T is below 8): the first 8 tokens of each row and what follows them,
  input_ids as they were read.
Numbers are written as f32 (whatever was computed in), ids as i64.")]
pub struct ModelRunArgs {
    /// Folder in Hugging Face layout
    pub folder: PathBuf,
    /// Tokens: tensor `input_ids`, [T] or [B,T], integers
    #[arg(long, value_name = "FILE.safetensors")]
    pub ids: PathBuf,
    /// File to write
    #[arg(long, value_name = "FILE.safetensors")]
    pub output: PathBuf,
    /// Also decode N tokens greedily behind the first 8 of each row
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(0..=1_000_000))]
    pub greedy: usize,
    /// Where to compute
    #[arg(long, value_enum, default_value = "cpu")]
    pub device: DeviceArg,
    /// Element type of the residual stream; f32 is f64 for families with a delta net
    #[arg(long, value_enum, default_value = "f32")]
    pub dtype: DtypeArg,
    /// CPU threads; 0 takes the cores that the process may use
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub threads: u32,
}

/// Runs the command.
pub fn run(parts: &Parts, command: &ModelCommand) -> anyhow::Result<ExitCode> {
    match command {
        ModelCommand::Info { folder } => super::print(&info(folder)?),
        ModelCommand::Export { folder, output } => export(folder, output)?,
        ModelCommand::Run(args) => match parts.tensors {
            Tensors::Here { model_run, .. } => model_run(args)?,
            Tensors::In(name) => return Err(exec::replace(name, std::time::SystemTime::now())),
        },
    }
    Ok(ExitCode::SUCCESS)
}

fn export(folder: &Path, output: &Path) -> anyhow::Result<()> {
    let source = Checkpoint::open(folder)?;
    let report = export_folder(folder, output, |spec| -> Result<_, ModelError> {
        Ok(source.read(spec)?.to_weight())
    })?;
    super::print(&format!(
        "{}: {} tensors of the network written, {} others passed through, {:.1} MB\n",
        output.display(),
        report.written,
        report.passed_through,
        report.bytes as f64 / 1e6
    ));
    Ok(())
}

/// Parts of a network in the order in which they are listed.
const PARTS: [&str; 7] = [
    "embedding",
    "attention",
    "delta net",
    "MLP",
    "router and experts",
    "norms",
    "head",
];

fn part_of(spec: &TensorSpec) -> usize {
    let name = spec.name.as_str();
    let found = [
        (0, name.contains("embed_tokens")),
        (6, name == "lm_head.weight"),
        (1, name.contains(".self_attn.")),
        (2, name.contains(".linear_attn.")),
        (
            4,
            spec.shape.len() == 3 || name.contains(".mlp.gate.") || name.contains("shared_expert"),
        ),
        (3, name.contains(".mlp.")),
    ];
    found.iter().find(|(_, is)| *is).map_or(5, |(part, _)| *part)
}

/// The text of `model info`.
fn info(folder: &Path) -> anyhow::Result<String> {
    let config = ModelConfig::from_dir(folder)?;
    let checkpoint = Checkpoint::open(folder)?;
    checkpoint.check(&config)?;
    let table = config.tensor_table();
    let mut parameters = [0usize; PARTS.len()];
    for spec in &table {
        parameters[part_of(spec)] += spec.numel();
    }
    let total: usize = parameters.iter().sum();
    let mut text = String::new();
    let attending = config
        .layers
        .iter()
        .filter(|l| l.mixer == crate::model::hf::MixerKind::FullAttention)
        .count();
    let _ = writeln!(
        text,
        "{}: {}{}, {} layers ({attending} attend, {} sparse), vocabulary {}",
        folder.display(),
        config.model_type.name(),
        if config.nested {
            " inside a vision model"
        } else {
            ""
        },
        config.num_hidden_layers,
        config.num_sparse_layers(),
        config.vocab_size
    );
    let _ = writeln!(
        text,
        "{:<20} {:>15} {:>10} {:>10}",
        "part", "parameters", "bf16 MB", "f32 MB"
    );
    let megabytes = |count: usize, bytes: usize| (count * bytes) as f64 / 1e6;
    let mut line = |name: &str, count: usize| {
        let (narrow, wide) = (megabytes(count, 2), megabytes(count, 4));
        let _ = writeln!(text, "{name:<20} {count:>15} {narrow:>10.1} {wide:>10.1}");
    };
    for (name, count) in PARTS.iter().zip(parameters) {
        if count > 0 {
            line(name, count);
        }
    }
    line("all", total);
    if let Some(experts) = config.experts {
        let stacked = table
            .iter()
            .filter(|s| s.shape.len() == 3 && s.name.contains(".experts."));
        let all: usize = stacked.map(TensorSpec::numel).sum();
        line(
            "used by a token",
            total - all + all / experts.num_experts * experts.top_k,
        );
    }
    let kv = attending * 2 * config.num_key_value_heads * config.head_dim;
    let _ = writeln!(
        text,
        "keys and values: {:.1} kB a token in f32",
        kv as f64 * 4.0 / 1e3
    );
    if let Some(linear) = config.linear_attention {
        let state = linear.num_value_heads * linear.key_head_dim * linear.value_head_dim
            + (linear.conv_kernel - 1) * linear.conv_dim();
        let layers = config.num_hidden_layers - attending;
        let bytes = (layers * state) as f64 * 4.0;
        let _ = writeln!(
            text,
            "state of the delta net: {:.2} MB a sequence in f32",
            bytes / 1e6
        );
    }
    let others = checkpoint.others(&config);
    if !others.is_empty() {
        let bytes: usize = others.iter().map(|(_, bytes)| bytes).sum();
        let _ = writeln!(
            text,
            "{} tensors ({:.1} MB) do not belong to the network and are passed through on export, first `{}`",
            others.len(),
            bytes as f64 / 1e6,
            others[0].0
        );
    }
    Ok(text)
}

/// `model run` in a program that has tensors.
#[cfg(feature = "torch")]
pub fn run_network(args: &ModelRunArgs) -> anyhow::Result<()> {
    use crate::model::net::{self, Policy};
    let draft = OutputDraft::new(args)?;
    let rows = read_ids(&args.ids)?;
    let wanted = match args.device {
        DeviceArg::Cpu => net::DeviceChoice::Cpu,
        DeviceArg::Cuda => net::DeviceChoice::Cuda,
    };
    let device = net::choose_device(wanted, 0).context("--device cuda")?;
    net::set_threads(args.threads);
    let policy = Policy::load(&args.folder, device)?.with_compute_type(compute_type(args.dtype));
    let vocab_size = policy.config.vocab_size as i64;
    if let Some(id) = rows.iter().flatten().find(|id| !(0..vocab_size).contains(*id)) {
        anyhow::bail!(
            "{}: token {id} is outside the vocabulary of {vocab_size}",
            args.ids.display()
        );
    }
    let mut tensors = net::trace(&policy, &rows);
    for tensor in &tensors {
        if let net::PlainValues::Floats(values) = &tensor.values {
            let count = values.iter().filter(|v| !v.is_finite()).count();
            anyhow::ensure!(
                count == 0,
                "{}: {count} of {} numbers of {} are not finite; look at config.json (rope, epsilon) and at the weights' size",
                args.folder.display(),
                values.len(),
                tensor.name
            );
        }
    }
    if args.greedy > 0 {
        tensors.push(greedy(&policy, &rows, args)?);
    }
    write_tensors(&draft.path, &tensors)?;
    draft.publish(&args.output)?;
    for tensor in &tensors {
        super::print(&format!("{} {:?}\n", tensor.name, tensor.shape));
    }
    Ok(())
}

#[cfg(feature = "torch")]
fn compute_type(dtype: DtypeArg) -> crate::model::net::ComputeType {
    match dtype {
        DtypeArg::F32 => crate::model::net::ComputeType::F32,
        DtypeArg::Bf16 => crate::model::net::ComputeType::Bf16,
    }
}

/// Tokens of a prompt for greedy decoding.
#[cfg(feature = "torch")]
const GREEDY_PROMPT: usize = 8;

#[cfg(feature = "torch")]
fn greedy(
    policy: &crate::model::net::Policy,
    rows: &[Vec<i64>],
    args: &ModelRunArgs,
) -> anyhow::Result<crate::model::net::PlainTensor> {
    use crate::model::net::{greedy_without_cache, PlainTensor, PlainValues};
    let prompt = GREEDY_PROMPT.min(rows[0].len());
    let prompts: Vec<&[i64]> = rows.iter().map(|row| &row[..prompt]).collect();
    // What the native engine does not compute (attention families in bf16 on the host) runs over the whole text
    // for every token.
    let engine_has_it =
        args.device == DeviceArg::Cuda || args.dtype == DtypeArg::F32 || policy.config.model_type.is_hybrid();
    let replies = if engine_has_it {
        engine_replies(policy, &prompts, args)?
    } else {
        let reply = |prompt: &&[i64]| greedy_without_cache(policy, prompt, args.greedy);
        prompts.iter().map(reply).collect()
    };
    let mut ids = Vec::new();
    for (prompt, reply) in prompts.iter().zip(replies) {
        ids.extend_from_slice(prompt);
        ids.extend(reply);
    }
    Ok(PlainTensor {
        name: "greedy".into(),
        shape: vec![rows.len(), prompt + args.greedy],
        values: PlainValues::Integers(ids),
    })
}

/// Greedy replies of the native engine to all prompts, which it decodes together.
#[cfg(feature = "torch")]
fn engine_replies(
    policy: &crate::model::net::Policy,
    prompts: &[&[i64]],
    args: &ModelRunArgs,
) -> anyhow::Result<Vec<Vec<i64>>> {
    use crate::{
        base::{Engine, EngineEvent, GenerateRequest, RequestId, SamplingParams, SessionId},
        serve::engine::native::{NativeEngine, NativeEngineConfig},
    };
    let length = prompts[0].len() + args.greedy + 1;
    let config = NativeEngineConfig {
        max_num_seqs: prompts.len(),
        max_model_len: length,
        kv_cache_tokens: (length + 32) * prompts.len(),
        num_threads: if args.threads == 0 {
            std::thread::available_parallelism().map_or(1, |n| n.get())
        } else {
            args.threads as usize
        },
        device: policy.device(),
        compute: compute_type(args.dtype),
        ..NativeEngineConfig::default()
    };
    let engine = NativeEngine::from_policy(config, policy)?;
    let mut inboxes = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        let (sender, inbox) = tokio::sync::mpsc::unbounded_channel();
        let request = GenerateRequest {
            id: RequestId(i as u64),
            session: SessionId::from(i.to_string().as_str()),
            prompt: prompt.iter().map(|id| *id as u32).collect(),
            sampling: SamplingParams {
                temperature: 0.0,
                ..SamplingParams::default()
            },
            stop_token_ids: Vec::new(),
            max_new_tokens: args.greedy as u32,
            routing_from: None,
        };
        engine.submit(request, sender);
        inboxes.push(inbox);
    }
    let mut replies = Vec::new();
    for mut inbox in inboxes {
        let mut reply = Vec::new();
        loop {
            match inbox.blocking_recv() {
                Some(EngineEvent::Tokens(tokens)) => reply.extend(tokens.iter().map(|t| i64::from(t.id))),
                Some(EngineEvent::Finished { .. }) => break,
                Some(EngineEvent::Failed(error)) => return Err(error.into()),
                None => anyhow::bail!("the engine ended before its reply was complete"),
            }
        }
        replies.push(reply);
    }
    Ok(replies)
}

/// The first names in order, and how many more there are.
#[cfg(feature = "torch")]
fn first_names(mut names: Vec<&str>) -> String {
    const SHOWN: usize = 5;
    names.sort_unstable();
    let more = names.len().saturating_sub(SHOWN);
    names.truncate(SHOWN);
    let text = names.join(", ");
    match more {
        0 => text,
        more => format!("{text} and {more} more"),
    }
}

/// The output while it is computed: a file beside it, which goes away unless it is published.
#[cfg(feature = "torch")]
struct OutputDraft {
    path: PathBuf,
}

#[cfg(feature = "torch")]
impl OutputDraft {
    /// Whatever stands against writing the output is found before anything is computed.
    fn new(args: &ModelRunArgs) -> anyhow::Result<Self> {
        let output = &args.output;
        let folder = match output.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let bad = |problem: String| anyhow::anyhow!("--output {}: {problem}", output.display());
        let Some(name) = output.file_name() else {
            return Err(bad("it names no file".into()));
        };
        let Ok(real) = folder.canonicalize() else {
            return Err(bad(format!(
                "there is no folder `{}`; make it first",
                folder.display()
            )));
        };
        if output.is_dir() {
            return Err(bad("it is a folder; name a file in it".into()));
        }
        if output.exists() && !output.is_file() {
            return Err(bad("it is no regular file, and would be replaced by one".into()));
        }
        if output
            .canonicalize()
            .is_ok_and(|path| args.ids.canonicalize().is_ok_and(|ids| ids == path))
        {
            return Err(bad(
                "it is the file of --ids, which would be lost; name another".into()
            ));
        }
        if args.folder.canonicalize().is_ok_and(|model| model == real) {
            return Err(bad(
                "in the model's own folder it would be taken for weights; name another".into(),
            ));
        }
        let path = folder.join(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
        std::fs::File::create(&path).map_err(|error| bad(error.to_string()))?;
        Ok(Self { path })
    }

    fn publish(self, output: &Path) -> anyhow::Result<()> {
        std::fs::rename(&self.path, output).with_context(|| format!("--output {}", output.display()))
    }
}

#[cfg(feature = "torch")]
impl Drop for OutputDraft {
    fn drop(&mut self) {
        // Gone already where it was published.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// `input_ids` as rows of equal length.
#[cfg(feature = "torch")]
fn read_ids(path: &Path) -> anyhow::Result<Vec<Vec<i64>>> {
    use safetensors::{Dtype, SafeTensors};
    let context = || format!("{}", path.display());
    let bytes = crate::base::files::read(path).with_context(context)?;
    let file = SafeTensors::deserialize(&bytes).with_context(context)?;
    let found = file.tensor("input_ids");
    let view = found.map_err(|_| {
        let names = first_names(file.names());
        anyhow::anyhow!("{}: no tensor `input_ids` (it has: {names})", path.display())
    })?;
    let ids: Vec<i64> = match view.dtype() {
        Dtype::I64 => view
            .data()
            .chunks_exact(8)
            .map(|b| i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
            .collect(),
        Dtype::I32 => view
            .data()
            .chunks_exact(4)
            .map(|b| i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]])))
            .collect(),
        other => anyhow::bail!(
            "{}: `input_ids` is {other:?}; I64 or I32 is wanted",
            path.display()
        ),
    };
    let length = match view.shape() {
        [length] | [_, length] if *length > 0 && !ids.is_empty() => *length,
        shape => anyhow::bail!(
            "{}: `input_ids` has shape {shape:?}; [T] or [B,T] is wanted",
            path.display()
        ),
    };
    Ok(ids.chunks_exact(length).map(<[i64]>::to_vec).collect())
}

#[cfg(feature = "torch")]
fn write_tensors(path: &Path, tensors: &[crate::model::net::PlainTensor]) -> anyhow::Result<()> {
    use crate::model::net::PlainValues;
    use safetensors::{tensor::TensorView, Dtype};
    let bytes: Vec<(Dtype, Vec<u8>)> = tensors
        .iter()
        .map(|t| match &t.values {
            PlainValues::Integers(values) => {
                (Dtype::I64, values.iter().flat_map(|v| v.to_le_bytes()).collect())
            }
            PlainValues::Floats(values) => {
                (Dtype::F32, values.iter().flat_map(|v| v.to_le_bytes()).collect())
            }
        })
        .collect();
    let mut views = Vec::with_capacity(tensors.len());
    for (tensor, (dtype, data)) in tensors.iter().zip(&bytes) {
        let view = TensorView::new(*dtype, tensor.shape.clone(), data)
            .with_context(|| format!("tensor `{}`", tensor.name))?;
        views.push((tensor.name.as_str(), view));
    }
    safetensors::serialize_to_file(views, None, path).with_context(|| format!("{}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures/models")
            .join(name)
    }

    #[test]
    fn info_names_family_parts_and_what_is_passed_through() {
        let text = info(&fixture("qwen3_5_moe")).unwrap();
        for part in [
            "qwen3_5_moe inside a vision model, 4 layers (1 attend, 4 sparse)",
            "router and experts",
            "used by a token",
            "state of the delta net",
            "passed through on export, first `model.visual.",
        ] {
            assert!(text.contains(part), "no `{part}` in\n{text}");
        }
        let text = info(&fixture("llama")).unwrap();
        assert!(text.contains("llama, 4 layers (4 attend, 0 sparse)"), "{text}");
        assert!(
            !text.contains("passed through") && !text.contains("delta"),
            "{text}"
        );
    }

    #[test]
    fn a_folder_that_is_none_is_named() {
        let error = info(Path::new("/nonexistent/model")).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/model/config.json"), "{error}");
    }

    #[cfg(feature = "torch")]
    #[test]
    fn run_writes_what_the_reference_file_holds() {
        use safetensors::SafeTensors;
        let dir = tempfile::tempdir().unwrap();
        let args = ModelRunArgs {
            folder: fixture("qwen3_next"),
            ids: fixture("qwen3_next.reference.safetensors"),
            output: dir.path().join("out.safetensors"),
            greedy: 64,
            device: DeviceArg::Cpu,
            dtype: DtypeArg::F32,
            threads: 1,
        };
        run_network(&args).unwrap();
        let (got, want) = (
            std::fs::read(&args.output).unwrap(),
            std::fs::read(&args.ids).unwrap(),
        );
        let (got, want) = (
            SafeTensors::deserialize(&got).unwrap(),
            SafeTensors::deserialize(&want).unwrap(),
        );
        for (name, view) in want.tensors() {
            let ours = got.tensor(&name).unwrap();
            assert_eq!(
                (ours.shape(), ours.dtype()),
                (view.shape(), view.dtype()),
                "{name}"
            );
            if name == "greedy" {
                assert_eq!(ours.data(), view.data());
            }
        }
        assert_eq!(got.len(), want.len());
        let wrong = ModelRunArgs {
            ids: fixture("qwen3_next/model.safetensors"),
            ..args.clone()
        };
        let error = run_network(&wrong).unwrap_err().to_string();
        assert!(error.contains("no tensor `input_ids`"), "{error}");
        let nowhere = ModelRunArgs {
            output: dir.path().join("none/out.safetensors"),
            ..args.clone()
        };
        let error = run_network(&nowhere).unwrap_err().to_string();
        assert!(error.contains("no folder") && error.contains("/none`"), "{error}");
        let refused = |output: &Path, problem: &str| {
            let wrong = ModelRunArgs {
                output: output.to_path_buf(),
                ..args.clone()
            };
            let error = run_network(&wrong).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        };
        refused(dir.path(), "it is a folder");
        refused(Path::new("/dev/null"), "no regular file");
        refused(&args.ids, "file of --ids");
        refused(&args.folder.join("new.safetensors"), "taken for weights");
        assert_eq!(first_names(vec!["b", "a"]), "a, b");
        assert_eq!(
            first_names(vec!["g", "f", "e", "d", "c", "b", "a"]),
            "a, b, c, d, e and 2 more"
        );
    }

    /// Ids that cannot be computed, and weights that are no numbers: one error, and no output.
    #[cfg(feature = "torch")]
    #[test]
    fn run_refuses_what_it_cannot_compute_and_leaves_nothing() {
        use safetensors::{tensor::TensorView, Dtype};
        let dir = tempfile::tempdir().unwrap();
        let args = ModelRunArgs {
            folder: fixture("qwen3"),
            ids: dir.path().join("ids.safetensors"),
            output: dir.path().join("out.safetensors"),
            greedy: 0,
            device: DeviceArg::Cpu,
            dtype: DtypeArg::F32,
            threads: 1,
        };
        let error_of = |args: &ModelRunArgs| {
            let error = crate::base::error_chain(&*run_network(args).unwrap_err());
            let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
            assert_eq!(left.len(), 1, "{left:?}");
            error
        };
        let write = |dtype: Dtype, shape: &[usize], data: &[u8]| {
            let view = TensorView::new(dtype, shape.to_vec(), data).unwrap();
            safetensors::serialize_to_file([("input_ids", view)], None, &args.ids).unwrap();
        };
        let long = |ids: &[i64]| -> Vec<u8> { ids.iter().flat_map(|id| id.to_le_bytes()).collect() };
        write(Dtype::F32, &[2], &[0; 8]);
        assert!(error_of(&args).contains("`input_ids` is F32"));
        write(Dtype::I64, &[1, 1, 2], &long(&[1, 2]));
        assert!(error_of(&args).contains("shape [1, 1, 2]"));
        write(Dtype::I64, &[1, 0], &[]);
        assert!(error_of(&args).contains("shape [1, 0]"));
        for id in [128, -1] {
            write(Dtype::I64, &[2], &long(&[3, id]));
            let error = error_of(&args);
            assert!(
                error.contains(&format!("token {id} is outside the vocabulary of 128")),
                "{error}"
            );
        }
        std::fs::write(&args.ids, "no tensors").unwrap();
        assert!(error_of(&args).contains("ids.safetensors"));
        write(Dtype::I64, &[2], &long(&[3, 4]));
        let broken = tempfile::tempdir().unwrap();
        let source = args.folder.join("config.json");
        std::fs::copy(source, broken.path().join("config.json")).unwrap();
        let mut data = std::fs::read(args.folder.join("model.safetensors")).unwrap();
        let last = data.len() - 4;
        data[last..].copy_from_slice(&f32::NAN.to_le_bytes());
        std::fs::write(broken.path().join("model.safetensors"), data).unwrap();
        let with_nan = ModelRunArgs {
            folder: broken.path().to_path_buf(),
            ..args.clone()
        };
        let error = error_of(&with_nan);
        assert!(
            error.contains("tensor `model.") && error.contains("is NaN or infinite"),
            "{error}"
        );
    }
}
