//! A small tokenizer folder for tests: all bytes, a few merges, Qwen3's markup tokens and a template.

use super::bytes::alphabet;
use serde_json::json;
use std::{collections::BTreeMap, path::Path};

/// Words that encode to one token each.
pub(crate) const WORDS: [&str; 8] = [
    "user",
    "assistant",
    "system",
    "name",
    "arguments",
    "hello",
    "tool",
    "world",
];

/// Added tokens in id order after the vocabulary: text and `special`.
pub(crate) const ADDED: [(&str, bool); 9] = [
    ("<|endoftext|>", true),
    ("<|im_start|>", true),
    ("<|im_end|>", true),
    ("<tool_call>", false),
    ("</tool_call>", false),
    ("<tool_response>", false),
    ("</tool_response>", false),
    ("<think>", false),
    ("</think>", false),
];

/// Own template with Qwen3's markup and hermes tool calls.
pub(crate) const TEMPLATE: &str = r#"
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n' }}
    {%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
            {%- set f = call.function %}
            {{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}
            {{- f.arguments if f.arguments is string else f.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"#;

/// Writes tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja.
pub(crate) fn write_folder(dir: &Path) {
    let mut chars: Vec<(u8, char)> = alphabet().into_iter().map(|(c, b)| (b, c)).collect();
    chars.sort_unstable();
    let mut vocab: BTreeMap<String, usize> = BTreeMap::new();
    for (i, (_, c)) in chars.iter().enumerate() {
        vocab.insert(c.to_string(), i);
    }
    let mut merges = Vec::new();
    for word in WORDS {
        for end in 2..=word.len() {
            let merged = word[..end].to_owned();
            if !vocab.contains_key(&merged) {
                vocab.insert(merged, vocab.len());
                merges.push(json!([&word[..end - 1], &word[end - 1..end]]));
            }
        }
    }
    let base = vocab.len();
    let added: Vec<_> = ADDED
        .iter()
        .enumerate()
        .map(|(i, (content, special))| {
            json!({"id": base + i, "content": content, "single_word": false, "lstrip": false,
                   "rstrip": false, "normalized": false, "special": special})
        })
        .collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": crate::model::bpe::QWEN2_PATTERN},
             "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false,
                  "vocab": vocab, "merges": merges},
    });
    let write =
        |name: &str, text: String| std::fs::write(dir.join(name), text).expect("test folder is writable");
    write("tokenizer.json", tokenizer.to_string());
    write(
        "tokenizer_config.json",
        json!({"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}}).to_string(),
    );
    write(
        "generation_config.json",
        json!({"eos_token_id": [base, base + 2]}).to_string(),
    );
    write("chat_template.jinja", TEMPLATE.trim_start().to_owned());
}
