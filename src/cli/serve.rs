//! `legorl-rank serve`: the proxy with its scheduler and balancer alone, in front of one engine.
//!
//! It captures what agents do with any backend, and it is what load tests drive. Sessions are opened and
//! closed over HTTP; see the module `serve::proxy::admin`. The configuration is a run config; of its
//! required variables only `MODEL_PATH` (tokenizer and chat template) is needed here. The native engine is sized by
//! the model and the free memory where the configuration says nothing ([`serving::fit_native`]).
//!
//! A backend behind a URL that breaks off is asked again every [`RECONNECT`] until it answers; turns wait for it as
//! they wait for any replica, and go on with the tokens that they have.
//!
//! SIGTERM or SIGINT drain: new requests get 429 or 529, running ones end, at most [`DRAIN`] long.

use super::{exec, ConfigArgs, Parts, Tensors};
use crate::{
    base::{Engine, ReplicaId},
    config::{self, values::RunKind, LoadRequest, Loaded},
    model::tokenizer::Tokenizer,
    rank::{
        serving,
        signals::{Answers, StopFlag},
    },
    serve::{
        engine::{
            scripted::{read_replies, ScriptedEngine, ScriptedReply},
            vllm::VllmEngine,
        },
        proxy::{router::Router, AdminConfig, Proxy, ProxyError},
    },
};
use anyhow::{bail, Context};
use clap::Args;
use std::{
    net::SocketAddr,
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

/// Longest time that running turns get after a signal.
pub const DRAIN: Duration = Duration::from_secs(30);
/// How often a lost backend is asked whether it is back.
pub const RECONNECT: Duration = Duration::from_secs(1);
/// Secret of the admin requests.
const ADMIN_SECRET: &str = "LEGORL_ADMIN_SECRET";
/// KV tokens of the scripted engine: it holds none.
const SCRIPTED_CAPACITY: u64 = 1 << 40;

/// Arguments of `serve`.
#[derive(Args)]
pub struct ServeArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// What generates: `native` (the policy of MODEL_PATH), `scripted`, or the URL of a vLLM server
    #[arg(long, value_name = "native|scripted|URL", default_value = "native")]
    engine: String,
    /// Address to listen on; PROXY_HOST and PROXY_PORT otherwise
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// Scripted engine: replies of a file, in order, for each session from the first one
    #[arg(long, value_name = "FILE", conflicts_with_all = ["reply_tokens", "reply_ms"])]
    script: Option<PathBuf>,
    /// Scripted engine: tokens of every reply
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    reply_tokens: Option<u32>,
    /// Scripted engine: milliseconds before a reply
    #[arg(long, value_name = "MS", requires = "reply_tokens")]
    reply_ms: Option<u64>,
    /// Threads of the proxy
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

/// Runs the command.
pub fn run(parts: &Parts, args: &ServeArgs) -> anyhow::Result<ExitCode> {
    if args.engine == "native" {
        if let Tensors::In(name) = parts.tensors {
            return Err(exec::replace(name, std::time::SystemTime::now()));
        }
    }
    let scripted = args.script.is_some() || args.reply_tokens.is_some();
    if scripted && args.engine != "scripted" {
        bail!(
            "--script and --reply-tokens are for --engine scripted, and the engine is `{}`",
            args.engine
        );
    }
    let secret = std::env::var(ADMIN_SECRET).unwrap_or_default();
    if secret.is_empty() {
        bail!("{ADMIN_SECRET} is not set: choose a secret; sessions are opened with it as bearer token");
    }
    let wanted = std::env::var("LEGORL_LOG").unwrap_or_else(|_| "warn".into());
    let filter =
        tracing_subscriber::EnvFilter::try_new(&wanted).with_context(|| format!("LEGORL_LOG={wanted}"))?;
    // Tests run several servers in one process; the first one's choice holds.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .try_init();
    let loaded = settings(args)?;
    let stop = StopFlag::install(Answers::SERVING).context("signal handlers")?;
    serve(args, loaded, secret, &stop)
}

/// The run config, with stand-ins for what only a training run needs.
fn settings(args: &ServeArgs) -> anyhow::Result<Loaded> {
    let request = args.config.request(RunKind::Train);
    let (layered, _) = config::layers::load(&request)?;
    let mut set = request.set.clone();
    for (name, stand_in) in [
        ("PROJECT_NAME", "serve"),
        ("EXP_NAME", "serve"),
        ("TRAIN_FILES", "none.parquet"),
    ] {
        if layered.get(name).is_none() {
            set.push(format!("{name}={stand_in}"));
        }
    }
    let loaded = config::load(&LoadRequest { set, ..request })?;
    for warning in &loaded.warnings {
        super::print_warning(warning);
    }
    Ok(loaded)
}

fn serve(args: &ServeArgs, mut loaded: Loaded, secret: String, stop: &StopFlag) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("a runtime")?;
    let engine = runtime.block_on(engine(args, &mut loaded))?;
    let settings = &loaded.settings;
    let mut window = settings.data.max_prompt_tokens + settings.data.max_response_tokens;
    if args.engine == "native" {
        window = window.min(settings.engine.max_model_len);
    }
    let remote = args.engine.contains("://");
    let router = Arc::new(Router::new(serving::router(settings)));
    router.join(ReplicaId(0), engine);
    let listen = match args.listen {
        Some(address) => address,
        None => serving::address(settings)?,
    };
    let socket = std::env::temp_dir().join(format!("legorl-serve-{}.sock", std::process::id()));
    let mut config = serving::proxy(settings, listen, socket);
    config.threads = args.threads;
    config.admin = Some(AdminConfig {
        secret,
        sampling: settings.sampling.params(),
        max_turns: settings.agent.max_iterations,
        max_total_tokens: window,
        max_tokens_per_turn: settings.engine.max_tokens_per_turn,
        max_time: settings.agent.max_timeout,
    });
    let proxy = Proxy::start(config, router.clone()).map_err(|error| match (error, args.listen) {
        (ProxyError::Bind { address, source }, Some(_)) => {
            anyhow::anyhow!(
                "cannot listen on {address}: {source}; choose another --listen (port 0 takes any)"
            )
        }
        (error, _) => error.into(),
    })?;
    let address = proxy.tcp().context("the proxy has no TCP address")?;
    super::print(&format!(
        "serving on http://{address} (engine: {})\n",
        args.engine
    ));
    let mut asked = Instant::now();
    while !stop.is_set() {
        std::thread::sleep(Duration::from_millis(50));
        if remote && asked.elapsed() >= RECONNECT && router.is_empty() {
            match runtime.block_on(VllmEngine::connect(&args.engine)) {
                Ok(engine) => router.join(ReplicaId(0), Arc::new(engine)),
                Err(error) => tracing::warn!(%error, "the backend is lost"),
            }
            asked = Instant::now();
        }
    }
    proxy.drain();
    super::print("draining\n");
    runtime.block_on(async {
        let end = tokio::time::Instant::now() + DRAIN;
        while proxy.running_turns() > 0 && tokio::time::Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        proxy.shutdown(DRAIN).await
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn engine(args: &ServeArgs, loaded: &mut Loaded) -> anyhow::Result<Arc<dyn Engine>> {
    match args.engine.as_str() {
        "native" => native(loaded),
        "scripted" => scripted(args, &loaded.settings),
        url if url.contains("://") => {
            let engine = VllmEngine::connect(url).await?;
            super::print(&format!("backend {url} serves {}\n", engine.model()));
            Ok(Arc::new(engine))
        }
        other => {
            bail!("--engine is `{other}`; it must be native, scripted or a URL such as http://127.0.0.1:8000")
        }
    }
}

#[cfg(feature = "torch")]
fn native(loaded: &mut Loaded) -> anyhow::Result<Arc<dyn Engine>> {
    use crate::{
        model::{hf::ModelConfig, net::Device},
        observe::memory,
        plan::memory::size,
        preflight::facts::machine,
        rank::{placement::placement, wiring},
        serve::engine::native::NativeEngine,
    };
    let Loaded {
        settings, layered, ..
    } = loaded;
    let model = ModelConfig::from_dir(&settings.model.path)?;
    let place = placement(settings)?;
    let on_host = place.device == Device::Cpu;
    let needed = wiring::engine_config(settings, place).memory(&model);
    // Weights come as stored, in f32 or less, and are laid out once more.
    let laid_out = place.compute.kind_for(&model).elt_size_in_bytes().max(4) as u64;
    let weights = model.num_parameters() as u64 * (4 + laid_out);
    let (page, fixed_bytes, available) = if on_host {
        let page = needed.cache_page + needed.host_page;
        (page, weights + needed.states, memory::available())
    } else {
        let free = machine::gpus()
            .into_iter()
            .map(|gpu| gpu.memory_bytes.saturating_sub(gpu.used_bytes));
        (needed.cache_page, weights + needed.states, free.min())
    };
    let bounds = serving::NativeBounds {
        positions: model.context_tokens() as u64,
        token_bytes: page.div_ceil(16),
        fixed_bytes,
        available,
    };
    serving::fit_native(settings, |name| layered.get(name).is_some(), &bounds)?;
    let config = wiring::engine_config(settings, place);
    super::print(&format!(
        "engine: windows of {} tokens, KV cache of {} tokens ({})\n",
        config.max_model_len,
        config.kv_cache_tokens,
        size(config.memory(&model).cache()),
    ));
    Ok(NativeEngine::start(config, &settings.model.path)?)
}

#[cfg(not(feature = "torch"))]
fn native(_: &Loaded) -> anyhow::Result<Arc<dyn Engine>> {
    bail!("the native engine is in legorl-rank-torch")
}

fn scripted(args: &ServeArgs, settings: &config::Settings) -> anyhow::Result<Arc<dyn Engine>> {
    let tokenizer = Tokenizer::from_dir(&settings.model.path)?;
    let named = tokenizer.named_tokens().get("eos_token");
    let end = named.and_then(|token| tokenizer.token_to_id(token));
    let end = end.or_else(|| tokenizer.stop_ids().last().copied());
    let end = end.with_context(|| format!("{} names no end-of-turn token", settings.model.path.display()))?;
    let replies = match (&args.script, args.reply_tokens) {
        (Some(file), _) => read_replies(file, &tokenizer, end)?,
        (None, Some(tokens)) => vec![fixed(&tokenizer, end, tokens, args.reply_ms.unwrap_or(0))?],
        (None, None) => bail!("--engine scripted needs --script FILE or --reply-tokens N"),
    };
    let script = move |_: &crate::base::GenerateRequest, number: u64| {
        replies[(number % replies.len() as u64) as usize].clone()
    };
    Ok(Arc::new(
        ScriptedEngine::new(SCRIPTED_CAPACITY, Box::new(script)).by_session(),
    ))
}

/// A reply of words that ends its turn, with this number of tokens.
fn fixed(tokenizer: &Tokenizer, end: u32, tokens: u32, ms: u64) -> anyhow::Result<ScriptedReply> {
    let mut ids = tokenizer.encode_text(&"a word and another one ".repeat(tokens as usize))?;
    ids.truncate(tokens as usize - 1);
    ids.push(end);
    Ok(ScriptedReply {
        first_delay: Duration::from_millis(ms),
        ..ids.into()
    })
}
