#!/bin/bash
set -e
cd /app
mkdir berry tiger beach
