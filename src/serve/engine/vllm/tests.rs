//! Answers of a vLLM server, and what one lacks.

use super::*;
use crate::base::SamplingParams;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::mpsc::unbounded_channel,
};

/// A server that answers each connection with the next of these bodies, and keeps the requests.
async fn backend(replies: Vec<(u16, &'static str)>) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = seen.clone();
    tokio::spawn(async move {
        for (status, reply) in replies {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            loop {
                let mut piece = [0; 4096];
                let n = stream.read(&mut piece).await.unwrap();
                request.extend_from_slice(&piece[..n]);
                let text = String::from_utf8_lossy(&request).into_owned();
                let Some((head, body)) = text.split_once("\r\n\r\n") else {
                    continue;
                };
                let length = head.to_ascii_lowercase();
                let length = length.split("content-length: ").nth(1);
                let length = length.map_or(0, |l| l.split("\r\n").next().unwrap().parse().unwrap());
                if body.len() >= length {
                    log.lock().unwrap().push(text);
                    break;
                }
            }
            let head = format!("HTTP/1.1 {status} x\r\nconnection: close\r\n\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            // In pieces that cut events apart.
            for piece in reply.as_bytes().chunks(7) {
                stream.write_all(piece).await.unwrap();
                stream.flush().await.unwrap();
            }
        }
    });
    (url, seen)
}

const MODELS: (u16, &str) = (200, "{\"data\": [{\"id\": \"org/model\"}]}");

async fn run(engine: &VllmEngine) -> (Vec<(u32, f32)>, EngineEvent) {
    let (sender, mut receiver) = unbounded_channel();
    let request = GenerateRequest {
        id: RequestId(1),
        session: "s".into(),
        prompt: vec![1, 2].into(),
        sampling: SamplingParams {
            seed: u64::MAX,
            ..SamplingParams::default()
        },
        stop_token_ids: vec![9],
        max_new_tokens: 4,
        routing_from: None,
    };
    engine.submit(request, sender);
    let mut tokens = Vec::new();
    loop {
        match receiver.recv().await.unwrap() {
            EngineEvent::Tokens(more) => tokens.extend(more.iter().map(|t| (t.id, t.logprob))),
            end => return (tokens, end),
        }
    }
}

#[tokio::test]
async fn tokens_and_log_probs_come_as_the_backend_sends_them() {
    let stream = concat!(
        ": comment\n\n",
        "data: {\"choices\": [{\"text\": \"a\", \"token_ids\": [7, 8], \"logprobs\": {\"token_logprobs\": [-0.5, -1.5]}, \"finish_reason\": null}]}\r\n\r\n",
        "data: {\"choices\": [{\"text\": \"\", \"token_ids\": [9], \"logprobs\": {\"token_logprobs\": [-0.25]}, \"finish_reason\": \"stop\"}]}\n\n",
        "data: {\"choices\": [], \"usage\": {}}\n\n",
        "data: [DONE]\n\n"
    );
    let (url, seen) = backend(vec![MODELS, (200, stream)]).await;
    let engine = VllmEngine::connect(&url).await.unwrap();
    let (tokens, end) = run(&engine).await;
    assert_eq!(tokens, [(7, -0.5), (8, -1.5), (9, -0.25)]);
    assert!(
        matches!(
            end,
            EngineEvent::Finished {
                reason: FinishReason::Stop,
                ..
            }
        ),
        "{end:?}"
    );
    let request = seen.lock().unwrap()[1].clone();
    assert!(
        request.starts_with("POST /v1/completions HTTP/1.1\r\n"),
        "{request}"
    );
    let body: Value = serde_json::from_str(request.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!(
        (
            &body["prompt"],
            &body["model"],
            &body["return_token_ids"],
            &body["top_k"]
        ),
        (&json!([1, 2]), &json!("org/model"), &json!(true), &json!(-1))
    );
    assert!(body["seed"].as_i64().is_some());
    assert_eq!(engine.status().running, 0);
}

#[tokio::test]
async fn what_a_backend_lacks_is_said() {
    let without_ids =
        "data: {\"choices\": [{\"text\": \"a\", \"logprobs\": {\"token_logprobs\": [-0.5]}, \"finish_reason\": null}]}\n\n";
    let uneven = "data: {\"choices\": [{\"token_ids\": [1, 2], \"logprobs\": {\"token_logprobs\": [-0.5]}, \"finish_reason\": null}]}\n\n";
    let cut = "data: {\"choices\": [{\"token_ids\": [1], \"logprobs\": {\"token_logprobs\": [-0.5]}, \"finish_reason\": null}]}\n\n";
    for (reply, word, lost) in [
        ((200, without_ids), "return_token_ids", false),
        ((200, uneven), "2 token ids with 1 log-probs", false),
        ((200, cut), "without a finish reason", true),
        ((400, "{\"error\": \"too long\"}"), "too long", false),
        ((503, "loading"), "status 503", true),
    ] {
        let (url, _) = backend(vec![MODELS, reply]).await;
        let engine = VllmEngine::connect(&url).await.unwrap();
        let (_, end) = run(&engine).await;
        let EngineEvent::Failed(error) = end else {
            panic!("{end:?}")
        };
        assert!(error.to_string().contains(word), "{error}");
        assert_eq!(matches!(error, EngineError::ReplicaLost(_)), lost, "{error}");
    }
    for (url, word) in [("https://x", "https is not served"), ("x:1", "http://HOST")] {
        let error = VllmEngine::connect(url).await.err().unwrap().to_string();
        assert!(error.contains(word), "{error}");
    }
    let (url, _) = backend(vec![(200, "{\"data\": []}")]).await;
    let error = VllmEngine::connect(&url).await.err().unwrap().to_string();
    assert!(error.contains("serves no model"), "{error}");
}
