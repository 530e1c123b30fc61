#!/bin/bash
# Passes when /app holds exactly what the task asked for: every path, every word, nothing else.
export LC_ALL=C
shopt -s globstar dotglob nullglob
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /app || exit 1

state() {
    local path words
    for path in **; do
        path=${path%/}
        if [[ -L $path ]]; then
            echo "link $path"
        elif [[ -d $path ]]; then
            echo "folder $path"
        elif [[ -f $path ]]; then
            words=$(tr -s '[:space:]' ' ' < "$path")
            words=${words# }
            echo "file $path: ${words% }"
        else
            echo "other $path"
        fi
    done | sort
}

wanted=$(sort << 'END'
file arrow.txt: Create the folder thistle.
file sage.txt: Create the folder silver.
folder silver
END
)
found=$(state)
if [[ $found == "$wanted" ]]; then
    echo 1 > /logs/verifier/reward.txt
    echo "passed"
else
    printf 'wanted:\n%s\nfound:\n%s\n' "$wanted" "$found"
fi
